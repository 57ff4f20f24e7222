//! What mixes the tokens of a text in each layer: attention, or a layer that keeps a state.

use anyhow::Result;

use super::Config;
use super::fields::Fields;
use super::mamba::MambaHeads;
use super::parts::LatentWidths;

/// What mixes the tokens of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerKind {
    /// Nothing: the layer has a feed-forward network alone.
    None,
    /// Attention, which keeps keys and values of tokens.
    Attention,
    /// Attention whose keys and values are made of latents, which it keeps.
    Latent(LatentWidths),
    /// A gated short convolution, whose state is the last inputs.
    ShortConv {
        /// The inputs that a token sees, its own included.
        taps: usize,
    },
    /// The gated delta rule, whose state is a matrix for each value head and the last inputs of convolutions.
    DeltaNet(DeltaHeads),
    /// Mamba 2, whose state is a matrix for each head and the last inputs of convolutions.
    Mamba(MambaHeads),
    /// Attention and Mamba 2 side by side, of the same states.
    Both(MambaHeads),
}

/// The heads of a layer with the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Key heads, and query heads.
    pub key: usize,
    /// Value heads. Each key head serves as many, one behind another.
    pub value: usize,
    /// The width of a key.
    pub key_dim: usize,
    /// The width of a value.
    pub value_dim: usize,
    /// The inputs that a token sees of each channel, its own included.
    pub taps: usize,
    /// Whether files have the rows of all projections of a key head together.
    pub by_key_head: bool,
}

impl DeltaHeads {
    /// The value heads of a key head.
    pub fn values(self) -> usize {
        self.value / self.key.max(1)
    }

    /// The channels of all queries, which are those of all keys, and of all values.
    pub fn channels(self) -> [usize; 2] {
        [self.key * self.key_dim, self.value * self.value_dim]
    }

    /// How many key heads stay together on a rank, so that the columns of their values are a multiple of `granule`, if that is possible.
    pub fn together(self, granule: usize) -> usize {
        let width = self.values() * self.value_dim;
        let fits = |heads: &usize| self.key.is_multiple_of(*heads) && (heads * width).is_multiple_of(granule);
        (1..=self.key).find(fits).unwrap_or(1)
    }
}

impl MixerKind {
    /// Whether it is attention, and keeps something of each token.
    pub fn is_attention(self) -> bool {
        matches!(self, Self::Attention | Self::Latent(_) | Self::Both(_))
    }

    /// Whether it keeps a state of a text, in the place of keys and values of its tokens or beside them.
    pub fn is_recurrent(self) -> bool {
        !matches!(self, Self::Attention | Self::Latent(_) | Self::None)
    }

    /// The heads of Mamba 2, if it has some.
    pub fn mamba(self) -> Option<MambaHeads> {
        match self {
            Self::Mamba(heads) | Self::Both(heads) => Some(heads),
            _ => None,
        }
    }

    /// The numbers of the state of a text in 32 bits, in a model of this width, on all `tp` ranks together.
    pub fn state_size(self, hidden: usize, tp: usize) -> usize {
        match self {
            Self::Attention | Self::Latent(_) | Self::None => 0,
            Self::Mamba(heads) | Self::Both(heads) => heads.state_size(tp),
            Self::ShortConv { taps } => hidden.saturating_mul(taps.saturating_sub(1)),
            Self::DeltaNet(heads) => {
                let [keys, values] = heads.channels();
                (2 * keys + values)
                    .saturating_mul(heads.taps.saturating_sub(1))
                    .saturating_add(keys.saturating_mul(values / heads.key.max(1)))
            }
        }
    }
}

impl Config {
    /// Whether some layers keep a state of a text.
    pub fn is_recurrent(&self) -> bool {
        self.parts.mixers.iter().any(|mixer| mixer.is_recurrent())
    }

    /// The bytes of the states of a text in all layers, on all `tp` ranks together.
    pub fn state_bytes(&self, tp: usize) -> usize {
        let of_layer = |mixer: &MixerKind| mixer.state_size(self.hidden_size, tp).saturating_mul(4);
        self.parts.mixers.iter().map(of_layer).fold(0, usize::saturating_add)
    }

    /// Why the tokens of a text cannot be distributed over `cp` ranks, if they cannot.
    pub fn refusal_of_token_ranks(&self, cp: usize) -> Option<String> {
        let layer = self.parts.mixers.iter().position(|mixer| mixer.is_recurrent()).filter(|_| cp > 1)?;
        Some(format!(
            "--cp {cp}: layer {layer} of a model of the family {} keeps a state of the whole text, and each rank would have some of its \
             tokens: leave --cp out, and give the ranks to --tp, --pp or --dp",
            self.family
        ))
    }
}

impl Fields {
    /// Reads what mixes the tokens of each layer from `layer_types`, by the names that `known` has.
    ///
    /// # Errors
    /// Those of [`by_layer_type`](Self::by_layer_type).
    pub(super) fn mixers(
        &self,
        layers: usize,
        known: &[(&str, MixerKind)],
    ) -> Result<Option<Vec<MixerKind>>> {
        self.by_layer_type(layers, known)
    }
}
