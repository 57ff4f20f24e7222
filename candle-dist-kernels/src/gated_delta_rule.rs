use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_dist::backend::Fresh;
use candle_dist::empty;

use super::attention::graph_node;
use super::rows::{add_assign, sum_zip, vectorised};
use super::{TensorReader, check_dtype, compute_dtype, parallel, real::Real};

/// The gated delta rule: a state that each token decays, corrects towards its value, and reads.
///
/// `q` and `k` are `[batch, tokens, heads, key]`, `v` is `[batch, tokens, heads, values · width]`, and `beta` and `g` are
/// `[batch, tokens, heads, values]`, all of one dtype: each key head has so many value heads. The state of a value head is a matrix
/// `S` `[key, width]`. Per token
///
/// `S ← e^g · S`, then `S ← S + k · (beta · (v - Sᵀ k))ᵀ`, and the result is `Sᵀ q`.
///
/// Returns the results, in the shape of `v`, and the states behind the last token, `[batch, key, heads, values · width]`, in f32 for
/// 16-bit floats. They begin as `state`, which gets no gradient, as the states that are returned have none; without it, with zeros.
/// With `history`, a number for each token of each element of the batch, states are zeros before the tokens whose number is 0.
///
/// The backward pass computes states again, from each of about √tokens of them, which it keeps for one head at a time. Fails if shapes,
/// dtypes or devices do not match. Source: Yang et al., <https://arxiv.org/abs/2412.06464>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let row = |values: [f32; 2]| Tensor::from_slice(&values, (1, 2, 1, 1), &Cpu);
/// // The second token keeps half of what the first one has written, 3, and corrects half of what lacks to 2.5.
/// let (q, k, v) = (row([1., 1.])?, row([1., 1.])?, row([3., 2.5])?);
/// let (beta, g) = (row([1., 0.5])?, row([0., 0.5f32.ln()])?);
/// let (y, state) = candle_dist_kernels::gated_delta_rule([&q, &k, &v], [&beta, &g], None, None)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [3., 2.]);
/// assert_eq!(state.flatten_all()?.to_vec1::<f32>()?, [2.]);
/// # Ok(())
/// # }
/// ```
pub fn gated_delta_rule(
    [q, k, v]: [&Tensor; 3],
    [beta, g]: [&Tensor; 2],
    state: Option<&Tensor>,
    history: Option<Arc<[u32]>>,
) -> Result<(Tensor, Tensor)> {
    let wide = compute_dtype("gated_delta_rule", q)?;
    [k, v, beta, g].into_iter().try_for_each(|x| check_dtype("gated_delta_rule", q, x))?;
    let Some(sizes) = DeltaSizes::of(q, k, v, [beta, g], state, history.as_deref()) else {
        bail!(
            "gated_delta_rule: q {:?}, k {:?}, v {:?}, beta {:?}, g {:?}, state {:?} do not fit",
            q.shape(),
            k.shape(),
            v.shape(),
            beta.shape(),
            g.shape(),
            state.map(Tensor::shape)
        );
    };
    let state = state.map(|state| state.detach().to_dtype(wide)?.contiguous()).transpose()?;
    if !q.device().is_cpu() || sizes.is_empty() {
        return composed([q, k, v], [beta, g], state.as_ref(), history.as_deref(), sizes);
    }
    // A node of the graph has three inputs.
    let keys = Tensor::cat(&[q, k], D::Minus1)?.to_dtype(wide)?.contiguous()?;
    let gates = Tensor::cat(&[beta, g], D::Minus1)?.to_dtype(wide)?.contiguous()?;
    let inputs = [&keys, &v.to_dtype(wide)?.contiguous()?, &gates];
    let rule = DeltaRule { sizes, state, history };
    let (y, state) = match wide {
        DType::F64 => rule.node::<f64>(inputs)?,
        _ => rule.node::<f32>(inputs)?,
    };
    Ok((y.to_dtype(v.dtype())?, state))
}

/// The same from candle's operations, one token after the other.
fn composed(
    [q, k, v]: [&Tensor; 3],
    [beta, g]: [&Tensor; 2],
    state: Option<&Tensor>,
    history: Option<&[u32]>,
    sizes: DeltaSizes,
) -> Result<(Tensor, Tensor)> {
    let DeltaSizes { batch, tokens, heads, key, values, width } = sizes;
    let (dtype, wide) = (v.dtype(), compute_dtype("gated_delta_rule", v)?);
    let kept = (batch, key, heads, values * width);
    let zeros = || Tensor::zeros(kept, wide, v.device());
    if sizes.is_empty() {
        let state = state.map_or_else(zeros, |state| Ok(state.clone()))?;
        return Ok((empty::zeros_of(&[q, k, v, beta, g], v.shape(), dtype)?, state));
    }
    // [batch, heads, values, key, width]
    let apart = |state: &Tensor| {
        state.reshape((batch, key, heads, values, width))?.permute((0, 2, 3, 1, 4))?.contiguous()
    };
    let mut s = apart(&state.map_or_else(zeros, |state| Ok(state.clone()))?)?;
    let at = |x: &Tensor, token: usize| x.narrow(1, token, 1)?.squeeze(1)?.to_dtype(wide);
    let mut made = Vec::with_capacity(tokens);
    for token in 0..tokens {
        if let Some(history) = history {
            let begins = (0..batch).map(|element| u8::from(history[element * tokens + token] == 0));
            let begins = Tensor::from_iter(begins, s.device())?.reshape((batch, 1, 1, 1, 1))?;
            s = begins.broadcast_as(s.shape())?.where_cond(&s.zeros_like()?, &s)?;
        }
        let column = |x: &Tensor| at(x, token)?.reshape((batch, heads, 1, key, 1));
        let number = |x: &Tensor| at(x, token)?.reshape((batch, heads, values, 1, 1));
        let (q, k) = (column(q)?, column(k)?);
        let value = at(v, token)?.reshape((batch, heads, values, 1, width))?;
        s = s.broadcast_mul(&number(g)?.exp()?)?;
        let seen = s.broadcast_mul(&k)?.sum_keepdim(3)?;
        let delta = (value - seen)?.broadcast_mul(&number(beta)?)?;
        s = (s + k.broadcast_mul(&delta)?)?;
        made.push(s.broadcast_mul(&q)?.sum(3)?.reshape((batch, 1, heads, values * width))?);
    }
    let state = s.detach().permute((0, 3, 1, 2, 4))?.contiguous()?.reshape(kept)?;
    Ok((Tensor::cat(&made, 1)?.to_dtype(dtype)?, state))
}

/// The sizes of the inputs.
#[derive(Clone, Copy, PartialEq, Eq)]
struct DeltaSizes {
    batch: usize,
    tokens: usize,
    /// Key heads.
    heads: usize,
    /// The width of a key.
    key: usize,
    /// The value heads of a key head.
    values: usize,
    /// The width of a value.
    width: usize,
}

impl DeltaSizes {
    /// The sizes, if all inputs fit.
    fn of(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        gates: [&Tensor; 2],
        state: Option<&Tensor>,
        history: Option<&[u32]>,
    ) -> Option<Self> {
        let (&[batch, tokens, heads, key], &[_, _, _, all]) = (q.dims(), v.dims()) else { return None };
        let &[_, _, _, values] = gates[0].dims() else { return None };
        let width = all.checked_div(values)?;
        let fits = k.dims() == q.dims()
            && v.dims() == [batch, tokens, heads, values * width]
            && gates.iter().all(|gate| gate.dims() == [batch, tokens, heads, values])
            && state.is_none_or(|state| state.dims() == [batch, key, heads, values * width])
            && history.is_none_or(|history| history.len() == batch * tokens);
        fits.then_some(Self { batch, tokens, heads, key, values, width })
    }

    fn is_empty(&self) -> bool {
        let Self { batch, tokens, heads, key, values, width } = *self;
        [batch, tokens, heads, key, values, width].contains(&0)
    }

    /// Each value head of each element of the batch.
    fn value_heads(&self) -> impl Iterator<Item = ValueHead> + use<> {
        let Self { batch, heads, values, .. } = *self;
        (0..batch * heads * values).map(move |at| ValueHead {
            element: at / (heads * values),
            head: at / values % heads,
            value: at % values,
        })
    }

    /// Whether several threads should compute.
    fn is_worth_it(&self) -> bool {
        let Self { batch, tokens, heads, key, values, width } = *self;
        batch * tokens * heads * values * key * width >= 64 * 1024
    }
}

/// A value head of an element of the batch.
#[derive(Clone, Copy)]
struct ValueHead {
    element: usize,
    /// Its key head.
    head: usize,
    /// Which of the value heads of the key head it is.
    value: usize,
}

/// The inputs of one token for a value head.
struct DeltaToken<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    beta: T,
    decay: T,
    /// Whether the state is zeros before it.
    begins: bool,
}

/// The elements of the keys, the values and the gates.
struct DeltaElements<'a, T> {
    rule: &'a DeltaRule,
    /// `[batch, tokens, heads, 2 · key]`, the query before the key.
    keys: &'a [T],
    values: &'a [T],
    /// `[batch, tokens, heads, 2 · values]`, betas before the logarithms of decays.
    gates: &'a [T],
}

impl<T: Real> DeltaElements<'_, T> {
    #[inline(always)]
    fn token(&self, at: ValueHead, token: usize) -> DeltaToken<'_, T> {
        let DeltaSizes { tokens, heads, key, values, width, .. } = self.rule.sizes;
        let place = at.element * tokens + token;
        let row = place * heads + at.head;
        let (q, k) = self.keys[row * 2 * key..][..2 * key].split_at(key);
        let gates = &self.gates[row * 2 * values..];
        DeltaToken {
            q,
            k,
            v: &self.values[(row * values + at.value) * width..][..width],
            beta: gates[at.value],
            decay: T::from_f64(gates[values + at.value].to_f64().exp()),
            begins: self.rule.history.as_ref().is_some_and(|history| history[place] == 0),
        }
    }
}

/// The state of a value head, and rows of its width.
struct Scan<T> {
    state: Vec<T>,
    /// What the state says of the last token's value.
    seen: Vec<T>,
    /// What the last token has written.
    delta: Vec<T>,
}

impl<T: Real> Scan<T> {
    fn new(state: Vec<T>, width: usize) -> Self {
        Self { state, seen: vec![T::zero(); width], delta: vec![T::zero(); width] }
    }

    /// Makes the state that a token sees, before its decay.
    #[inline(always)]
    fn enter(&mut self, token: &DeltaToken<'_, T>) {
        if token.begins {
            self.state.fill(T::zero());
        }
    }

    /// Decays the state and writes the token.
    #[inline(always)]
    fn write(&mut self, token: &DeltaToken<'_, T>) {
        let width = self.seen.len();
        self.seen.fill(T::zero());
        for (row, &k) in self.state.chunks_exact_mut(width).zip(token.k) {
            for (s, seen) in row.iter_mut().zip(&mut self.seen) {
                *s *= token.decay;
                *seen += k * *s;
            }
        }
        for ((delta, &v), &seen) in self.delta.iter_mut().zip(token.v).zip(&self.seen) {
            *delta = token.beta * (v - seen);
        }
        for (row, &k) in self.state.chunks_exact_mut(width).zip(token.k) {
            for (s, &delta) in row.iter_mut().zip(&self.delta) {
                *s += k * delta;
            }
        }
    }

    /// Adds what the token reads.
    #[inline(always)]
    fn read(&self, token: &DeltaToken<'_, T>, made: &mut [T]) {
        for (row, &q) in self.state.chunks_exact(self.seen.len()).zip(token.q) {
            for (made, &s) in made.iter_mut().zip(row) {
                *made += q * s;
            }
        }
    }
}

/// The gradients of a value head, token by token.
struct HeadGrads<T> {
    /// The query before the key.
    keys: Vec<T>,
    values: Vec<T>,
    /// Beta and the logarithm of the decay.
    gates: Vec<[T; 2]>,
}

struct DeltaRule {
    sizes: DeltaSizes,
    /// In the dtype of the computation.
    state: Option<Tensor>,
    history: Option<Arc<[u32]>>,
}

impl DeltaRule {
    /// The results as a node of the graph, and the last states.
    fn node<T: Real>(self, inputs: [&Tensor; 3]) -> Result<(Tensor, Tensor)> {
        let DeltaSizes { batch, tokens, heads, key, values, width } = self.sizes;
        let (made, kept) = self.forward::<T>(inputs)?;
        let state = Tensor::from_vec(kept, (batch, key, heads, values * width), &Device::Cpu)?;
        let shape = vec![batch, tokens, heads, values * width];
        let made = Fresh::host(T::to_cpu_storage_owned(made), shape);
        let backward = move |inputs: [&Tensor; 3], [_, grad]: [&Tensor; 2]| {
            self.backward::<T>(inputs, &grad.contiguous()?)
        };
        Ok((graph_node("gated_delta_rule", inputs, made, backward)?, state))
    }

    /// Calls `run` with the elements of the inputs and of the first states, if there are some.
    fn with_inputs<T: Real, R>(
        &self,
        [keys, values, gates]: [&Tensor; 3],
        run: impl FnOnce(&DeltaElements<'_, T>, Option<&[T]>) -> R,
    ) -> Result<R> {
        let readers = [keys, values, gates].map(TensorReader::new);
        let state = self.state.as_ref().map(TensorReader::new);
        let [keys, values, gates] = &readers;
        let inputs = DeltaElements {
            rule: self,
            keys: keys.elements()?,
            values: values.elements()?,
            gates: gates.elements()?,
        };
        Ok(run(&inputs, state.as_ref().map(TensorReader::elements).transpose()?))
    }

    /// The first state `[key, width]` of a value head.
    fn first<T: Real>(&self, at: ValueHead, state: Option<&[T]>) -> Vec<T> {
        let DeltaSizes { key, width, .. } = self.sizes;
        let Some(state) = state else { return vec![T::zero(); key * width] };
        self.state_rows(at).flat_map(|row| state[row..][..width].iter().copied()).collect()
    }

    /// Where the rows of the state of a value head are in those of all.
    fn state_rows(&self, at: ValueHead) -> impl Iterator<Item = usize> + use<> {
        let DeltaSizes { heads, key, values, width, .. } = self.sizes;
        let row = move |i: usize| ((at.element * key + i) * heads + at.head) * values + at.value;
        (0..key).map(move |i| row(i) * width)
    }

    /// The results and the last states.
    fn forward<T: Real>(&self, inputs: [&Tensor; 3]) -> Result<(Vec<T>, Vec<T>)> {
        let sizes @ DeltaSizes { batch, tokens, heads, key, values, width } = self.sizes;
        let of_head = |inputs: &DeltaElements<'_, T>, at: ValueHead, state: Option<&[T]>| {
            vectorised(
                #[inline(always)]
                || {
                    let mut scan = Scan::new(self.first(at, state), width);
                    let mut made = vec![T::zero(); tokens * width];
                    for (token, made) in made.chunks_exact_mut(width).enumerate() {
                        let token = inputs.token(at, token);
                        scan.enter(&token);
                        scan.write(&token);
                        scan.read(&token, made);
                    }
                    (made, scan.state)
                },
            )
        };
        self.with_inputs(inputs, |inputs, state| {
            let run = |_: usize, at: ValueHead| (at, of_head(inputs, at, state));
            let mut made = vec![T::zero(); batch * tokens * heads * values * width];
            let mut kept = vec![T::zero(); batch * key * heads * values * width];
            for (at, (of_head, last)) in parallel::map(sizes.is_worth_it(), sizes.value_heads(), run) {
                for (token, row) in of_head.chunks_exact(width).enumerate() {
                    let place = ((at.element * tokens + token) * heads + at.head) * values + at.value;
                    made[place * width..][..width].copy_from_slice(row);
                }
                for (start, row) in self.state_rows(at).zip(last.chunks_exact(width)) {
                    kept[start..][..width].copy_from_slice(row);
                }
            }
            (made, kept)
        })
    }

    /// The gradients of the inputs.
    fn backward<T: Real>(&self, inputs: [&Tensor; 3], grad: &Tensor) -> Result<[Tensor; 3]> {
        let sizes @ DeltaSizes { tokens, heads, key, values, width, .. } = self.sizes;
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
            for (at, head) in parallel::map(sizes.is_worth_it(), sizes.value_heads(), run) {
                for token in 0..tokens {
                    let row = (at.element * tokens + token) * heads + at.head;
                    add_assign(&mut of_keys[row * 2 * key..][..2 * key], &head.keys[token * 2 * key..]);
                    let place = (row * values + at.value) * width;
                    of_values[place..][..width].copy_from_slice(&head.values[token * width..][..width]);
                    let gates = &mut of_gates[row * 2 * values..][..2 * values];
                    [gates[at.value], gates[values + at.value]] = head.gates[token];
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
        inputs: &DeltaElements<'_, T>,
        at: ValueHead,
        first: Vec<T>,
        grads: &[T],
    ) -> HeadGrads<T> {
        let DeltaSizes { tokens, heads, key, values, width, .. } = self.sizes;
        let chunk = tokens.isqrt().max(1);
        // The state before each chunk.
        let mut starts = Vec::with_capacity(tokens.div_ceil(chunk));
        let mut scan = Scan::new(first, width);
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
                    let k = input.k[row];
                    of_k[row] -= input.decay * sum_zip(before, of_value, |s, of_value| s * of_value);
                    for (of_s, &of_value) in of_row.iter_mut().zip(&*of_value) {
                        *of_s -= k * of_value;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::waves::waves;
    use candle_core::Var;

    /// The first element begins anew at its fourth token, the second one at its second.
    const HISTORY: [u32; 14] = [0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5];

    #[test]
    fn the_composed_form_equals_the_fused_one() -> Result<()> {
        let sizes = DeltaSizes { batch: 2, tokens: 7, heads: 3, key: 4, values: 2, width: 5 };
        let shapes: [&[usize]; 5] =
            [&[2, 7, 3, 4], &[2, 7, 3, 4], &[2, 7, 3, 10], &[2, 7, 3, 2], &[2, 7, 3, 2]];
        let vars: Vec<Var> = (shapes.iter().enumerate())
            .map(|(i, shape)| {
                Var::from_tensor(&(waves(shape, DType::F64).as_tensor() * (0.3 + 0.1 * i as f64))?)
            })
            .collect::<Result<_>>()?;
        let [q, k, v, beta, g] = [0, 1, 2, 3, 4].map(|i: usize| vars[i].as_tensor());
        let first = (waves(&[2, 4, 3, 10], DType::F64).as_tensor() * 0.7)?;
        for (state, history) in
            [(None, None), (Some(&first), None), (Some(&first), Some(HISTORY)), (None, Some(HISTORY))]
        {
            let history = history.map(|history| Arc::from(&history[..]));
            let fused = gated_delta_rule([q, k, v], [beta, g], state, history.clone())?;
            let plain = composed([q, k, v], [beta, g], state, history.as_deref(), sizes)?;
            let far = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max_all()?.to_scalar::<f64>();
            assert!(far(&fused.0, &plain.0)? < 1e-13 && far(&fused.1, &plain.1)? < 1e-13);
            let grads = |y: &Tensor| (y * (y + 1.0)?)?.sum_all()?.backward();
            let (fused, plain) = (grads(&fused.0)?, grads(&plain.0)?);
            for (i, var) in vars.iter().enumerate() {
                let (Some(got), Some(want)) = (fused.get(var), plain.get(var)) else { bail!("no gradient") };
                let far = far(got, want)?;
                assert!(far < 1e-12, "input {i}: {far}");
            }
        }
        Ok(())
    }

    #[test]
    fn a_text_in_two_parts_is_the_text() -> Result<()> {
        let shapes: [&[usize]; 5] =
            [&[1, 9, 2, 4], &[1, 9, 2, 4], &[1, 9, 2, 6], &[1, 9, 2, 2], &[1, 9, 2, 2]];
        let all =
            shapes.map(|shape| (waves(shape, DType::F32).as_tensor() * 0.5).and_then(|x| x.contiguous()));
        let all = all.into_iter().collect::<Result<Vec<_>>>()?;
        let run = |start: usize, tokens: usize, state: Option<&Tensor>| {
            let parts = all.iter().map(|x| x.narrow(1, start, tokens)).collect::<Result<Vec<_>>>()?;
            let [q, k, v, beta, g] = [0, 1, 2, 3, 4].map(|i: usize| &parts[i]);
            gated_delta_rule([q, k, v], [beta, g], state, None)
        };
        let (whole, last) = run(0, 9, None)?;
        let (first, state) = run(0, 5, None)?;
        let (second, end) = run(5, 4, Some(&state))?;
        let diff = (whole - Tensor::cat(&[first, second], 1)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert_eq!((diff, (last - end)?.abs()?.max_all()?.to_scalar::<f32>()?), (0.0, 0.0));
        Ok(())
    }
}
