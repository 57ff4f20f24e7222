use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use candle_dist_base::Fresh;

use super::sizes::{ScanSizes, ValueHead};
use crate::attention::graph_node;
use crate::rows::vectorised;
use crate::{TensorReader, parallel, real::Real};

/// A scan over the tokens of sequences, which correct the state towards their values, or add to it.
pub(super) struct StateScan<const CORRECTS: bool> {
    pub(super) sizes: ScanSizes,
    /// In the dtype of the computation.
    pub(super) state: Option<Tensor>,
    pub(super) history: Option<Arc<[u32]>>,
}

/// The inputs of one token for a value head.
pub(super) struct ScanToken<'a, T> {
    pub(super) q: &'a [T],
    pub(super) k: &'a [T],
    pub(super) v: &'a [T],
    pub(super) beta: T,
    pub(super) decay: T,
    /// Whether the state is zeros before it.
    pub(super) begins: bool,
}

/// The elements of the keys, the values and the gates.
pub(super) struct ScanElements<'a, T, const CORRECTS: bool> {
    scan: &'a StateScan<CORRECTS>,
    /// `[batch, tokens, heads, 2 · key]`, the query before the key.
    keys: &'a [T],
    values: &'a [T],
    /// `[batch, tokens, heads, values]`, the logarithms of decays, or twice as many, with betas before them.
    gates: &'a [T],
}

impl<T: Real, const CORRECTS: bool> ScanElements<'_, T, CORRECTS> {
    /// The gates of a value head.
    const GATES: usize = 1 + CORRECTS as usize;

    #[inline(always)]
    pub(super) fn token(&self, at: ValueHead, token: usize) -> ScanToken<'_, T> {
        let ScanSizes { tokens, heads, key, values, width, .. } = self.scan.sizes;
        let place = at.element * tokens + token;
        let row = place * heads + at.head;
        let (q, k) = self.keys[row * 2 * key..][..2 * key].split_at(key);
        let gates = &self.gates[row * Self::GATES * values..];
        ScanToken {
            q,
            k,
            v: &self.values[(row * values + at.value) * width..][..width],
            beta: if CORRECTS { gates[at.value] } else { T::one() },
            decay: T::from_f64(gates[(Self::GATES - 1) * values + at.value].to_f64().exp()),
            begins: self.scan.history.as_ref().is_some_and(|history| history[place] == 0),
        }
    }
}

/// The state of a value head, and rows of its width.
pub(super) struct Scan<T, const CORRECTS: bool> {
    pub(super) state: Vec<T>,
    /// What the state says of the last token's value, if tokens correct it.
    pub(super) seen: Vec<T>,
    /// What the last token has written.
    pub(super) delta: Vec<T>,
}

impl<T: Real, const CORRECTS: bool> Scan<T, CORRECTS> {
    pub(super) fn new(state: Vec<T>, width: usize) -> Self {
        Self { state, seen: vec![T::zero(); width], delta: vec![T::zero(); width] }
    }

    /// Makes the state that a token sees, before its decay.
    #[inline(always)]
    pub(super) fn enter(&mut self, token: &ScanToken<'_, T>) {
        if token.begins {
            self.state.fill(T::zero());
        }
    }

    /// Decays the state and writes the token.
    #[inline(always)]
    pub(super) fn write(&mut self, token: &ScanToken<'_, T>) {
        let width = self.seen.len();
        if !CORRECTS {
            self.delta.copy_from_slice(token.v);
            for (row, &k) in self.state.chunks_exact_mut(width).zip(token.k) {
                for (s, &v) in row.iter_mut().zip(token.v) {
                    *s = *s * token.decay + k * v;
                }
            }
            return;
        }
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
    pub(super) fn read(&self, token: &ScanToken<'_, T>, made: &mut [T]) {
        for (row, &q) in self.state.chunks_exact(self.seen.len()).zip(token.q) {
            for (made, &s) in made.iter_mut().zip(row) {
                *made += q * s;
            }
        }
    }
}

impl<const CORRECTS: bool> StateScan<CORRECTS> {
    /// The results as a node of the graph, and the last states.
    pub(super) fn node<T: Real>(self, op: &'static str, inputs: [&Tensor; 3]) -> Result<(Tensor, Tensor)> {
        let ScanSizes { batch, tokens, heads, values, width, .. } = self.sizes;
        let (made, kept) = self.forward::<T>(inputs)?;
        let state = Tensor::from_vec(kept, self.sizes.state(), &Device::Cpu)?;
        let shape = vec![batch, tokens, heads, values * width];
        let made = Fresh::host(T::to_cpu_storage_owned(made), shape);
        let backward = move |inputs: [&Tensor; 3], [_, grad]: [&Tensor; 2]| {
            self.backward::<T>(inputs, &grad.contiguous()?)
        };
        Ok((graph_node(op, inputs, made, backward)?, state))
    }

    /// Calls `run` with the elements of the inputs and of the first states, if there are some.
    pub(super) fn with_inputs<T: Real, R>(
        &self,
        [keys, values, gates]: [&Tensor; 3],
        run: impl FnOnce(&ScanElements<'_, T, CORRECTS>, Option<&[T]>) -> R,
    ) -> Result<R> {
        let readers = [keys, values, gates].map(TensorReader::new);
        let state = self.state.as_ref().map(TensorReader::new);
        let [keys, values, gates] = &readers;
        let inputs = ScanElements {
            scan: self,
            keys: keys.elements()?,
            values: values.elements()?,
            gates: gates.elements()?,
        };
        Ok(run(&inputs, state.as_ref().map(TensorReader::elements).transpose()?))
    }

    /// The first state `[key, width]` of a value head.
    pub(super) fn first<T: Real>(&self, at: ValueHead, state: Option<&[T]>) -> Vec<T> {
        let ScanSizes { key, width, .. } = self.sizes;
        let Some(state) = state else { return vec![T::zero(); key * width] };
        self.sizes.state_rows(at).flat_map(|row| state[row..][..width].iter().copied()).collect()
    }

    /// The results and the last states.
    fn forward<T: Real>(&self, inputs: [&Tensor; 3]) -> Result<(Vec<T>, Vec<T>)> {
        let sizes @ ScanSizes { batch, tokens, heads, key, values, width } = self.sizes;
        let of_head = |inputs: &ScanElements<'_, T, CORRECTS>, at: ValueHead, state: Option<&[T]>| {
            vectorised(
                #[inline(always)]
                || {
                    let mut scan = Scan::<T, CORRECTS>::new(self.first(at, state), width);
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
                for (start, row) in self.sizes.state_rows(at).zip(last.chunks_exact(width)) {
                    kept[start..][..width].copy_from_slice(row);
                }
            }
            (made, kept)
        })
    }
}
