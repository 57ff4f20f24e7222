use candle_core::{Device, Result, Tensor};

use super::scan::{Scan, ScanElements, StateScan};
use super::sizes::{ScanSizes, ValueHead};
use crate::rows::{add_assign, sum_zip, vectorised};
use crate::{TensorReader, parallel, real::Real};

/// The value heads whose gradients are in memory at once.
const HEADS: usize = 32;

/// The gradients of a value head, token by token.
struct HeadGrads<T> {
    /// The query before the key.
    keys: Vec<T>,
    values: Vec<T>,
    /// Beta and the logarithm of the decay.
    gates: Vec<[T; 2]>,
}

impl<const CORRECTS: bool> StateScan<CORRECTS> {
    /// The gradients of the inputs.
    pub(super) fn backward<T: Real>(&self, inputs: [&Tensor; 3], grad: &Tensor) -> Result<[Tensor; 3]> {
        let sizes @ ScanSizes { tokens, heads, key, values, width, .. } = self.sizes;
        let grad = TensorReader::new(grad);
        let grads = grad.elements::<T>()?;
        let shapes = inputs.map(Tensor::shape);
        let made = self.with_inputs(inputs, |inputs, state| {
            let run = |_: usize, at: ValueHead| {
                let grads = vectorised(
                    #[inline(always)]
                    || self.head_grads(inputs, at, self.first(at, state), grads),
                );
                (at, grads)
            };
            let mut all = shapes.map(|shape| vec![T::zero(); shape.elem_count()]);
            let [of_keys, of_values, of_gates] = &mut all;
            let value_heads: Vec<ValueHead> = sizes.value_heads().collect();
            for some in value_heads.chunks(HEADS) {
                for (at, head) in parallel::map(sizes.is_worth_it(), some.iter().copied(), run) {
                    for token in 0..tokens {
                        let row = (at.element * tokens + token) * heads + at.head;
                        add_assign(&mut of_keys[row * 2 * key..][..2 * key], &head.keys[token * 2 * key..]);
                        let place = (row * values + at.value) * width;
                        of_values[place..][..width].copy_from_slice(&head.values[token * width..][..width]);
                        let [of_beta, of_g] = head.gates[token];
                        if CORRECTS {
                            of_gates[row * 2 * values + at.value] = of_beta;
                            of_gates[(row * 2 + 1) * values + at.value] = of_g;
                        } else {
                            of_gates[row * values + at.value] = of_g;
                        }
                    }
                }
            }
            all
        })?;
        let [keys, of_values, gates] = made;
        let tensor = |data: Vec<T>, at: usize| Tensor::from_vec(data, shapes[at], &Device::Cpu);
        Ok([tensor(keys, 0)?, tensor(of_values, 1)?, tensor(gates, 2)?])
    }

    /// The gradients of one value head.
    #[inline(always)]
    fn head_grads<T: Real>(
        &self,
        inputs: &ScanElements<'_, T, CORRECTS>,
        at: ValueHead,
        first: Vec<T>,
        grads: &[T],
    ) -> HeadGrads<T> {
        let ScanSizes { tokens, heads, key, values, width, .. } = self.sizes;
        let chunk = tokens.isqrt().max(1);
        // The state before each chunk.
        let mut starts = Vec::with_capacity(tokens.div_ceil(chunk));
        let mut scan = Scan::<T, CORRECTS>::new(first, width);
        for token in 0..tokens {
            if token.is_multiple_of(chunk) {
                starts.push(scan.state.clone());
            }
            let token = inputs.token(at, token);
            scan.enter(&token);
            scan.write(&token);
        }
        let mut made = HeadGrads {
            keys: vec![T::zero(); tokens * 2 * key],
            values: vec![T::zero(); tokens * width],
            gates: vec![[T::zero(); 2]; tokens],
        };
        let mut of_state = vec![T::zero(); key * width];
        let mut of_delta = vec![T::zero(); width];
        let mut before = vec![T::zero(); chunk.min(tokens) * key * width];
        let mut written = vec![T::zero(); chunk.min(tokens) * 2 * width];
        for (nth, start) in starts.into_iter().enumerate().rev() {
            let begin = nth * chunk;
            let end = tokens.min(begin + chunk);
            scan.state = start;
            for token in begin..end {
                let (i, input) = (token - begin, inputs.token(at, token));
                scan.enter(&input);
                before[i * key * width..][..key * width].copy_from_slice(&scan.state);
                scan.write(&input);
                let (seen, delta) = written[i * 2 * width..][..2 * width].split_at_mut(width);
                seen.copy_from_slice(&scan.seen);
                delta.copy_from_slice(&scan.delta);
            }
            for token in (begin..end).rev() {
                let (i, input) = (token - begin, inputs.token(at, token));
                let place = ((at.element * tokens + token) * heads + at.head) * values + at.value;
                let grad = &grads[place * width..][..width];
                let (seen, delta) = written[i * 2 * width..][..2 * width].split_at(width);
                let before = &before[i * key * width..][..key * width];
                let (of_q, of_k) = made.keys[token * 2 * key..][..2 * key].split_at_mut(key);
                of_delta.fill(T::zero());
                for (row, (of_row, before)) in
                    of_state.chunks_exact_mut(width).zip(before.chunks_exact(width)).enumerate()
                {
                    let (q, k) = (input.q[row], input.k[row]);
                    // The state that the token reads is the decayed one and what it has written.
                    of_q[row] = input.decay * sum_zip(before, grad, |s, grad| s * grad)
                        + k * sum_zip(delta, grad, |delta, grad| delta * grad);
                    for ((of_s, &grad), of_delta) in of_row.iter_mut().zip(grad).zip(&mut of_delta) {
                        *of_s += q * grad;
                        *of_delta += k * *of_s;
                    }
                    of_k[row] = sum_zip(of_row, delta, |of_s, delta| of_s * delta);
                }
                let of_value = &mut made.values[token * width..][..width];
                let mut of_beta = T::zero();
                for (i, (of_value, &of_delta)) in of_value.iter_mut().zip(&of_delta).enumerate() {
                    of_beta += of_delta * (input.v[i] - seen[i]);
                    *of_value = input.beta * of_delta;
                }
                let mut of_decay = T::zero();
                for (row, (of_row, before)) in
                    of_state.chunks_exact_mut(width).zip(before.chunks_exact(width)).enumerate()
                {
                    if CORRECTS {
                        let k = input.k[row];
                        of_k[row] -= input.decay * sum_zip(before, of_value, |s, of_value| s * of_value);
                        for (of_s, &of_value) in of_row.iter_mut().zip(&*of_value) {
                            *of_s -= k * of_value;
                        }
                    }
                    of_decay += sum_zip(of_row, before, |of_s, s| of_s * s);
                    for of_s in of_row.iter_mut() {
                        *of_s *= input.decay;
                    }
                }
                // The decay is e^g.
                made.gates[token] = [of_beta, of_decay * input.decay];
                if input.begins {
                    of_state.fill(T::zero());
                }
            }
        }
        made
    }
}
