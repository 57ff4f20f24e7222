use candle_core::Tensor;

/// The sizes of the inputs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ScanSizes {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    /// Key heads.
    pub(super) heads: usize,
    /// The width of a key.
    pub(super) key: usize,
    /// The value heads of a key head.
    pub(super) values: usize,
    /// The width of a value.
    pub(super) width: usize,
}

impl ScanSizes {
    /// The sizes, if all inputs fit.
    pub(super) fn of(
        [q, k, v]: [&Tensor; 3],
        gates: &[&Tensor],
        state: Option<&Tensor>,
        history: Option<&[u32]>,
    ) -> Option<Self> {
        let (&[batch, tokens, heads, key], &[_, _, _, all]) = (q.dims(), v.dims()) else { return None };
        let &[_, _, _, values] = gates.first()?.dims() else { return None };
        // Without value heads a value has any width.
        let width = all.checked_div(values).unwrap_or(0);
        let fits = k.dims() == q.dims()
            && v.dims() == [batch, tokens, heads, values * width]
            && gates.iter().all(|gate| gate.dims() == [batch, tokens, heads, values])
            && state.is_none_or(|state| state.dims() == [batch, key, heads, values * width])
            && history.is_none_or(|history| history.len() == batch * tokens);
        fits.then_some(Self { batch, tokens, heads, key, values, width })
    }

    /// The shape of the states.
    pub(super) fn state(self) -> (usize, usize, usize, usize) {
        let Self { batch, heads, key, values, width, .. } = self;
        (batch, key, heads, values * width)
    }

    pub(super) fn is_empty(&self) -> bool {
        let Self { batch, tokens, heads, key, values, width } = *self;
        [batch, tokens, heads, key, values, width].contains(&0)
    }

    /// Each value head of each element of the batch.
    pub(super) fn value_heads(&self) -> impl Iterator<Item = ValueHead> + use<> {
        let Self { batch, heads, values, .. } = *self;
        (0..batch * heads * values).map(move |at| ValueHead {
            element: at / (heads * values),
            head: at / values % heads,
            value: at % values,
        })
    }

    /// Where the rows of the state of a value head are in those of all.
    pub(super) fn state_rows(self, at: ValueHead) -> impl Iterator<Item = usize> + use<> {
        let ScanSizes { heads, key, values, width, .. } = self;
        let row = move |i: usize| ((at.element * key + i) * heads + at.head) * values + at.value;
        (0..key).map(move |i| row(i) * width)
    }

    /// Whether several threads should compute.
    pub(super) fn is_worth_it(&self) -> bool {
        let Self { batch, tokens, heads, key, values, width } = *self;
        batch * tokens * heads * values * key * width >= 64 * 1024
    }
}

/// A value head of an element of the batch.
#[derive(Clone, Copy)]
pub(super) struct ValueHead {
    pub(super) element: usize,
    /// Its key head.
    pub(super) head: usize,
    /// Which of the value heads of the key head it is.
    pub(super) value: usize,
}
