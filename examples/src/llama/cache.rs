//! Keys and values of the tokens so far, each rank those of its heads.

use candle_core::Tensor;
use candle_shard::{DTensor, Error, Result, Spec};

/// The keys and values of every layer, with room for a number of tokens.
#[derive(Debug)]
pub struct Cache {
    layers: Vec<Option<[Tensor; 2]>>,
    room: usize,
    len: usize,
}

/// The part of a cache that is one layer's.
pub(super) struct Past<'a> {
    cache: &'a mut Cache,
    layer: usize,
}

impl Past<'_> {
    /// The tokens that were there before.
    pub(super) fn len(&self) -> usize {
        self.cache.len
    }

    /// The keys and values `[batch, heads, tokens, dim]` from the first token on, with these behind them.
    ///
    /// # Errors
    /// Those of candle; the caller sees to it that there is room.
    pub(super) fn extend(self, new: [&DTensor; 2]) -> Result<[DTensor; 2]> {
        self.cache.extend(self.layer, new)
    }
}

impl Cache {
    /// A cache for so many layers and tokens; its memory is taken with the first tokens.
    pub fn new(layers: usize, room: usize) -> Self {
        Self { layers: vec![None; layers], room, len: 0 }
    }

    /// The tokens in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many tokens it can hold.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Checks that there is room for so many tokens more.
    ///
    /// # Errors
    /// If there is not.
    pub(super) fn check(&self, tokens: usize) -> Result<()> {
        if self.len + tokens <= self.room {
            return Ok(());
        }
        let (len, room) = (self.len, self.room);
        Err(Error::Layout(format!("{tokens} tokens after {len} in a cache for {room}; make it larger")))
    }

    /// Takes note that all layers have taken `tokens` more.
    pub(super) fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// What the cache has of a layer.
    pub(super) fn past(&mut self, layer: usize) -> Past<'_> {
        Past { cache: self, layer }
    }

    fn extend(&mut self, layer: usize, new: [&DTensor; 2]) -> Result<[DTensor; 2]> {
        let (room, start) = (self.room, self.len);
        let fresh = |new: &DTensor| {
            let mut shape = new.to_local().dims().to_vec();
            shape[2] = room;
            Tensor::zeros(shape, new.dtype(), new.device())
        };
        let held = match &mut self.layers[layer] {
            Some(held) => held,
            empty => empty.insert([fresh(new[0])?, fresh(new[1])?]),
        };
        let [keys, values] = [0, 1].map(|i| {
            let (held, new) = (&held[i], new[i]);
            let tokens = new.dims()[2];
            if new.to_local().elem_count() > 0 {
                held.slice_set(&new.to_local().contiguous()?, 2, start)?;
            }
            DTensor::from_local_with_spec(held.narrow(2, 0, start + tokens)?, of_tokens(new.spec(), start + tokens)?)
        });
        Ok([keys?, values?])
    }
}

/// The layout of `[batch, heads, tokens, dim]` with another number of tokens, which are on no axis.
fn of_tokens(spec: &Spec, tokens: usize) -> Result<Spec> {
    let mut shape = spec.dims().to_vec();
    shape[2] = tokens;
    let longer = Spec::new(spec.mesh(), spec.placements(), shape, spec.dtype())?;
    (0..spec.mesh().ndim()).try_fold(longer, |longer, axis| longer.with_sizes(axis, spec.sizes(axis).cloned()))
}
