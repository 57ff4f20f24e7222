//! Keys and values of the tokens so far, each rank those of its heads.

use candle_core::DType;
use candle_shard::nn::KvCache;
use candle_shard::{DTensor, Error, Result};

/// The keys and values of every layer, with room for a number of tokens.
#[derive(Debug)]
pub struct Cache {
    layers: Vec<KvCache>,
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
    /// Those of [`KvCache::append`]; the caller sees to it that there is room.
    pub(super) fn extend(self, [k, v]: [&DTensor; 2]) -> Result<[DTensor; 2]> {
        let (k, v) = self.cache.layers[self.layer].append(k, v)?;
        Ok([k, v])
    }
}

impl Cache {
    /// A cache for so many layers and tokens; its memory is taken with the first tokens.
    pub fn new(layers: usize, room: usize) -> Self {
        Self { layers: (0..layers).map(|_| KvCache::new(2, room)).collect(), room, len: 0 }
    }

    /// Keeps keys and values in this dtype, if there is one: 16 bits take half of the memory of 32.
    pub fn with_dtype(mut self, dtype: Option<DType>) -> Self {
        if let Some(dtype) = dtype {
            self.layers = self.layers.into_iter().map(|layer| layer.with_dtype(dtype)).collect();
        }
        self
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
}
