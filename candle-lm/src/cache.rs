//! What layers keep of the tokens so far, each rank that of its heads or channels: keys and values, the latents that they are made of, or a
//! state.

use std::collections::BTreeMap;

use candle_core::DType;
use candle_dist::DeviceMesh;
use candle_shard::nn::{KvCache, LatentCache, RotatingKvCache, SequenceCache, TextCache, TextKv, TextTokens};
use candle_shard::{DTensor, Error, Result, TokenOrder};

use crate::config::Config;
use crate::config::mixers::MixerKind;
use crate::step::{SlotPast, SlotTokens};

/// The dim of the tokens in keys and values `[batch, heads, tokens, dim]`.
const TOKENS: usize = 2;

/// The keys and values, or the state, of every layer for one text, with room for a number of tokens.
#[derive(Debug)]
pub struct Cache {
    layers: Vec<LayerCache>,
    room: usize,
    len: usize,
    /// What they are kept in, if not in the dtype that they come in.
    dtype: Option<DType>,
}

/// What one layer keeps.
#[derive(Debug)]
enum LayerCache {
    /// Those of all tokens.
    All(KvCache),
    /// Those of the last tokens, which are all that a layer with a window sees.
    Window(RotatingKvCache),
    /// The latents of all tokens, with what keys have in common.
    Latent(LatentCache),
    /// Those of all tokens, latents and what keys have in common too: each rank of a mesh axis has a part of them. The dtype is theirs, if it is not that of the model.
    Cut(Box<SequenceCache>, Option<DType>),
    /// The state behind the last token.
    State(LayerState),
    /// Keys and values, and a state, of a layer that has attention and Mamba 2 side by side.
    Both(Box<[LayerCache; 2]>),
    /// Nothing: the layer uses the keys and values of another one.
    Shared,
}

/// What a recurrent layer keeps of a text: the inputs of up to three convolutions, and a matrix for each head. Each comes with the first token.
pub(crate) type LayerState = [Option<DTensor>; 4];

/// The keys and values of layers that others use too, by the numbers of these layers.
pub(crate) type SharedKeys = BTreeMap<usize, LayerKeys>;

/// The keys and values of a layer that others use too.
#[derive(Clone)]
pub(crate) struct LayerKeys {
    /// Those of the new tokens, `[batch, heads, tokens, dim]`.
    pub(crate) new: [DTensor; 2],
    pub(crate) seen: SeenKeys,
}

/// What the new tokens of each text see.
#[derive(Clone)]
pub(crate) enum SeenKeys {
    /// The tokens belong to no texts with a cache, or what they see is not told.
    Untold,
    Whole(Vec<TextKv>),
    Cut(Vec<VisibleKv>),
}

/// The keys and values that new tokens see in a cache of which each rank has some tokens.
#[derive(Clone)]
pub(crate) struct VisibleKv {
    /// The new tokens, which are the last ones.
    pub(crate) tokens: usize,
    /// `[batch, tokens, heads, dim]`.
    pub(crate) keys: DTensor,
    /// `[batch, tokens, heads, dim]`.
    pub(crate) values: DTensor,
    /// The order of their tokens.
    pub(crate) order: TokenOrder,
}

/// A cache of which each rank has some tokens.
pub(crate) struct SequenceParts<'a> {
    cache: &'a mut SequenceCache,
    dtype: Option<DType>,
}

impl SequenceParts<'_> {
    /// Appends keys and values `[batch, tokens, heads, dim]`, and returns all.
    pub(crate) fn extend(self, [k, v]: [&DTensor; 2]) -> Result<VisibleKv> {
        let (given, kept) = (k.dtype(), self.dtype.unwrap_or(k.dtype()));
        self.cache.append(&k.to_dtype(kept)?, &v.to_dtype(kept)?)?;
        let (keys, values) = self.cache.keys_and_values()?;
        Ok(VisibleKv {
            tokens: k.dims()[1],
            keys: keys.to_dtype(given)?,
            values: values.to_dtype(given)?,
            order: self.cache.order()?,
        })
    }
}

impl LayerCache {
    /// That of the layer of this number.
    fn of(config: &Config, layer: usize, room: usize) -> Self {
        match (config.parts.mixer(layer), config.parts.window(layer)) {
            (MixerKind::Latent(_), _) => Self::Latent(LatentCache::new(TOKENS, room)),
            (MixerKind::Both(_), _) => {
                let keys = Self::All(KvCache::new(TOKENS, room));
                Self::Both(Box::new([keys, Self::State(LayerState::default())]))
            }
            (mixer, _) if mixer.is_recurrent() => Self::State(LayerState::default()),
            (_, Some(window)) if window < room => Self::Window(RotatingKvCache::new(TOKENS, window)),
            _ => Self::All(KvCache::new(TOKENS, room)),
        }
    }

    /// That of no tokens, whose memory grows by so many.
    fn with_block(self, tokens: usize) -> Self {
        match self {
            Self::All(_) => Self::All(KvCache::new(TOKENS, tokens)),
            Self::Latent(_) => Self::Latent(LatentCache::new(TOKENS, tokens)),
            Self::Both(both) => Self::Both(Box::new((*both).map(|part| part.with_block(tokens)))),
            other => other,
        }
    }

    fn with_dtype(self, dtype: DType) -> Self {
        match self {
            Self::All(cache) => Self::All(cache.with_dtype(dtype)),
            Self::Window(cache) => Self::Window(cache.with_dtype(dtype)),
            Self::Latent(cache) => Self::Latent(cache.with_dtype(dtype)),
            Self::Cut(cache, _) => Self::Cut(cache, Some(dtype)),
            // States add up what they get, in 32 bits.
            Self::State(state) => Self::State(state),
            Self::Both(both) => Self::Both(Box::new((*both).map(|part| part.with_dtype(dtype)))),
            Self::Shared => Self::Shared,
        }
    }

    /// Whether it keeps a state of the whole text.
    fn has_state(&self) -> bool {
        matches!(self, Self::State(_) | Self::Both(_))
    }

    fn reset(&mut self) {
        match self {
            Self::All(cache) => cache.reset(),
            Self::Window(cache) => cache.reset(),
            Self::Latent(cache) => cache.reset(),
            Self::Cut(cache, _) => cache.reset(),
            Self::State(state) => *state = LayerState::default(),
            Self::Both(both) => both.iter_mut().for_each(Self::reset),
            Self::Shared => {}
        }
    }

    /// A copy of the first tokens; `None` for a layer that keeps no more than the last ones, or a state behind them.
    fn prefix(&self, tokens: usize) -> Result<Option<Self>> {
        Ok(Some(match self {
            Self::All(cache) => Self::All(cache.prefix(tokens)?),
            Self::Latent(cache) => Self::Latent(cache.prefix(tokens)?),
            Self::Cut(cache, dtype) => Self::Cut(Box::new(cache.prefix(tokens)?), *dtype),
            Self::Shared => Self::Shared,
            Self::Window(_) | Self::State(_) | Self::Both(_) => return Ok(None),
        }))
    }
}

/// The part of a cache that is one layer's.
pub(crate) struct LayerPast<'a> {
    kept: &'a mut LayerCache,
    len: usize,
}

impl LayerPast<'_> {
    /// The tokens that were there before.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// The new tokens of a text in one layer, and what the cache has of those before them.
pub(crate) struct LayerTokens<'a> {
    pub(crate) tokens: usize,
    pub(crate) past: LayerPast<'a>,
}

/// The new tokens of a text, and a cache of which each rank has some tokens.
pub(crate) struct CutTurn<'a> {
    pub(crate) tokens: usize,
    pub(crate) past: SequenceParts<'a>,
}

/// The texts of a step in one layer, whose caches are all of one kind.
pub(crate) enum Texts<'a> {
    Whole(Vec<TextTokens<'a>>),
    Cut(Vec<CutTurn<'a>>),
}

/// The new tokens of a text, and the state behind those before them.
pub(crate) struct TextState<'a> {
    pub(crate) tokens: usize,
    pub(crate) slots: &'a mut LayerState,
}

/// The states of the texts of a recurrent layer.
///
/// # Errors
/// If the cache was made without them.
pub(crate) fn states(turns: Vec<LayerTokens<'_>>) -> Result<Vec<TextState<'_>>> {
    let of_text = |LayerTokens { tokens, past }| match past.kept {
        LayerCache::State(slots) => Ok(TextState { tokens, slots }),
        _ => {
            Err(Error::Layout("a cache without states for a recurrent layer: make it with Cache::of".into()))
        }
    };
    turns.into_iter().map(of_text).collect()
}

/// The texts of a layer with attention and a state side by side, for each of them.
///
/// # Errors
/// If the cache was made without states.
pub(crate) fn both(turns: Vec<LayerTokens<'_>>) -> Result<[Vec<LayerTokens<'_>>; 2]> {
    let mut made = [const { Vec::new() }; 2];
    for LayerTokens { tokens, past: LayerPast { kept, len } } in turns {
        let LayerCache::Both(parts) = kept else {
            return Err(Error::Layout(
                "a cache without states for a layer that has one beside attention: make it with Cache::of"
                    .into(),
            ));
        };
        for (made, kept) in made.iter_mut().zip(parts.iter_mut()) {
            made.push(LayerTokens { tokens, past: LayerPast { kept, len } });
        }
    }
    Ok(made)
}

/// What `run` makes of inputs `[1, tokens, ..]`, text by text.
pub(crate) fn of_each_text<const N: usize>(
    inputs: [&DTensor; N],
    texts: Vec<TextState<'_>>,
    run: impl Fn([&DTensor; N], &mut TextState<'_>) -> Result<DTensor>,
) -> Result<DTensor> {
    let (mut start, is_one) = (0, texts.len() == 1);
    let mut made = Vec::with_capacity(texts.len());
    for mut text in texts {
        if is_one {
            return run(inputs, &mut text);
        }
        let parts = inputs.iter().map(|x| x.narrow(1, start, text.tokens)).collect::<Result<Vec<_>>>()?;
        let parts: [&DTensor; N] = std::array::from_fn(|at| &parts[at]);
        start += text.tokens;
        made.push(run(parts, &mut text)?);
    }
    DTensor::cat(&made, 1)
}

/// The new tokens of each text in a layer that keeps nothing, since it uses the keys and values of another one.
pub(crate) fn shared(turns: &[LayerTokens<'_>]) -> Option<Vec<usize>> {
    let tokens = |turn: &LayerTokens<'_>| matches!(turn.past.kept, LayerCache::Shared).then_some(turn.tokens);
    turns.iter().map(tokens).collect()
}

/// Sorts the texts of a layer by the kind of its caches.
///
/// # Errors
/// If the cache has states or nothing in their place.
pub(crate) fn texts(turns: Vec<LayerTokens<'_>>) -> Result<Texts<'_>> {
    let (mut whole, mut cut) = (Vec::with_capacity(turns.len()), Vec::new());
    for LayerTokens { tokens, past } in turns {
        match past.kept {
            LayerCache::All(cache) => whole.push(TextTokens { tokens, cache: TextCache::All(cache) }),
            LayerCache::Window(cache) => whole.push(TextTokens { tokens, cache: TextCache::Window(cache) }),
            LayerCache::Latent(cache) => whole.push(TextTokens { tokens, cache: TextCache::Latent(cache) }),
            LayerCache::Cut(cache, dtype) => {
                cut.push(CutTurn { tokens, past: SequenceParts { cache, dtype: *dtype } });
            }
            LayerCache::State(_) | LayerCache::Both(_) | LayerCache::Shared => {
                return Err(Error::Layout(
                    "a cache without keys for attention that has some: make it with Cache::of".into(),
                ));
            }
        }
    }
    Ok(if cut.is_empty() { Texts::Whole(whole) } else { Texts::Cut(cut) })
}

impl Cache {
    /// Creates a cache of `room` tokens for each of `layers` layers of keys and values without windows. It allocates when the first
    /// tokens come.
    pub fn new(layers: usize, room: usize) -> Self {
        let all = |_| LayerCache::All(KvCache::new(TOKENS, room));
        Self { layers: (0..layers).map(all).collect(), room, len: 0, dtype: None }
    }

    /// Creates a cache of `room` tokens for each layer of a model. A layer with a window keeps no more than its window, a recurrent
    /// one a state, and one that uses the keys of another nothing.
    pub fn of(config: &Config, room: usize) -> Self {
        let kept = |layer| match config.parts.key_source(layer) {
            Some(_) => LayerCache::Shared,
            None => LayerCache::of(config, layer, room),
        };
        Self { layers: (0..config.num_hidden_layers).map(kept).collect(), room, len: 0, dtype: None }
    }

    /// Creates a cache for one layer by itself, which keeps the keys of another that it uses.
    pub(crate) fn of_layer(config: &Config, layer: usize, room: usize) -> Self {
        Self { layers: vec![LayerCache::of(config, layer, room)], room, len: 0, dtype: None }
    }

    /// Gives each rank of a mesh axis a part of the tokens of all layers without windows. A layer with a window keeps
    /// few tokens, which all ranks have.
    ///
    /// # Errors
    /// If the mesh has no such axis, there is room for no token, or a layer keeps a state of all tokens.
    pub fn over(mut self, mesh: &DeviceMesh, axis: &str) -> Result<Self> {
        if let Some(layer) = self.layers.iter().position(LayerCache::has_state) {
            return Err(Error::Layout(format!(
                "layer {layer} keeps a state of the whole text, and ranks of the axis {axis:?} would have some of its tokens: leave the \
                 axis out"
            )));
        }
        for layer in &mut self.layers {
            if matches!(layer, LayerCache::All(_) | LayerCache::Latent(_)) {
                *layer = LayerCache::Cut(Box::new(SequenceCache::new(mesh, axis, self.room)?), self.dtype);
            }
        }
        Ok(self)
    }

    /// Takes memory for so many tokens at a time in all layers that keep all tokens on each rank, instead of
    /// all at once. The cache is empty.
    pub(crate) fn with_block(mut self, tokens: usize) -> Self {
        self.layers = self.layers.into_iter().map(|layer| layer.with_block(tokens.min(self.room))).collect();
        self
    }

    /// Keeps keys and values in this dtype, if there is one: 16 bits take half of the memory of 32.
    pub fn with_dtype(mut self, dtype: Option<DType>) -> Self {
        if let Some(dtype) = dtype {
            self.layers = self.layers.into_iter().map(|layer| layer.with_dtype(dtype)).collect();
            self.dtype = Some(dtype);
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

    /// Whether it can be cut back, because all layers keep all tokens.
    pub(crate) fn can_be_cut(&self) -> bool {
        !self.layers.iter().any(|layer| matches!(layer, LayerCache::Window(_)) || layer.has_state())
    }

    /// Returns a cache with a copy of the first tokens.
    ///
    /// # Errors
    /// If there are fewer tokens, or a layer keeps only the last ones, or a state behind them.
    pub fn prefix(&self, tokens: usize) -> Result<Self> {
        let layers = (0..self.layers.len()).map(|at| self.layer_prefix(at, tokens)).collect::<Result<_>>()?;
        Ok(Self { layers, room: self.room, len: tokens, dtype: self.dtype })
    }

    fn layer_prefix(&self, at: usize, tokens: usize) -> Result<LayerCache> {
        self.layers[at].prefix(tokens)?.ok_or_else(|| {
            Error::Layout(format!(
                "the first {tokens} of {} tokens: layer {at} of the cache does not keep them all; compute them again",
                self.len
            ))
        })
    }

    /// Leaves the first tokens, layer by layer, so that little is there twice.
    fn cut_back(&mut self, tokens: usize) -> Result<()> {
        for at in 0..self.layers.len() {
            self.layers[at] = self.layer_prefix(at, tokens)?;
        }
        self.len = tokens;
        Ok(())
    }

    fn forget(&mut self) {
        self.layers.iter_mut().for_each(LayerCache::reset);
        self.len = 0;
    }

    fn past(&mut self, layer: usize) -> LayerPast<'_> {
        LayerPast { kept: &mut self.layers[layer], len: self.len }
    }
}

/// Forgets what is in the slots of texts that begin, cuts or copies what is before others, and checks that all slots have room for
/// the new tokens.
///
/// # Errors
/// If a slot has not, or lacks the tokens of a prefix.
pub(crate) fn begin(slots: &mut [Cache], spans: &[SlotTokens]) -> Result<()> {
    let copy = |span: &SlotTokens| match span.past {
        SlotPast::Prefix { slot, tokens } if slot != span.slot => Some((span.slot, slot, tokens)),
        _ => None,
    };
    let mut copies: Vec<(usize, usize, usize)> = spans.iter().filter_map(copy).collect();
    // What nobody copies from goes first: copies are those of what was there before the step, and a slot is never
    // there twice.
    let is_source = |copies: &[(usize, usize, usize)], slot| copies.iter().any(|&(_, from, _)| from == slot);
    for span in spans.iter().filter(|span| span.past == SlotPast::Nothing && !is_source(&copies, span.slot)) {
        slots[span.slot].forget();
    }
    while let Some(next) = copies.iter().position(|&(slot, ..)| !is_source(&copies, slot)) {
        let (slot, from, tokens) = copies.swap_remove(next);
        slots[slot].forget();
        slots[slot] = slots[from].prefix(tokens)?;
    }
    // Those that copy from each other in a ring are there twice.
    let ring = copies.iter().map(|&(slot, from, tokens)| Ok((slot, slots[from].prefix(tokens)?)));
    for (slot, copied) in ring.collect::<Result<Vec<_>>>()? {
        slots[slot] = copied;
    }
    for SlotTokens { slot, tokens, past, .. } in spans {
        let cache = &mut slots[*slot];
        match past {
            SlotPast::Nothing => cache.forget(),
            SlotPast::Prefix { slot: from, tokens } if from == slot && *tokens != cache.len => {
                cache.cut_back(*tokens)?;
            }
            SlotPast::Prefix { .. } | SlotPast::All => {}
        }
        if cache.len + tokens > cache.room {
            let Cache { len, room, .. } = cache;
            return Err(Error::Layout(format!(
                "{tokens} tokens after {len} in a cache for {room}; make it larger"
            )));
        }
    }
    Ok(())
}

/// Returns what a layer needs of the slots.
pub(crate) fn turns<'a>(slots: &'a mut [Cache], layer: usize, spans: &[SlotTokens]) -> Vec<LayerTokens<'a>> {
    let mut spans = spans.iter().filter(|span| span.tokens > 0).peekable();
    let turn = |(i, cache): (usize, &'a mut Cache)| {
        let span = spans.next_if(|span| span.slot == i)?;
        Some(LayerTokens { tokens: span.tokens, past: cache.past(layer) })
    };
    slots.iter_mut().enumerate().filter_map(turn).collect()
}

/// Takes note that all layers have the new tokens.
pub(crate) fn advance(slots: &mut [Cache], spans: &[SlotTokens]) {
    spans.iter().for_each(|span| slots[span.slot].len += span.tokens);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests;
