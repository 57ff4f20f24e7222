//! A decoder layer.

use std::sync::Arc;

use candle_shard::nn::{self, Init, MeshVarBuilder};
use candle_shard::{DTensor, Error, Replicate, Result};

use crate::TOKEN_AXIS;
use crate::attention::SelfAttention;
use crate::balance::DecoderRouter;
use crate::cache::{self, LayerTokens, SharedKeys};
use crate::config::Config;
use crate::config::mixers::MixerKind;
use crate::config::parts::{Multipliers, Norms};
use crate::config::tensors::LAYER_SCALAR;
use crate::delta_net::DeltaNet;
use crate::feed_forward::FeedForward;
use crate::latent::LatentAttention;
use crate::layer_embeddings::EmbeddingGate;
use crate::mamba::Mamba;
use crate::norm::Norm;
use crate::projection::scaled;
use crate::rope::Angles;
use crate::short_conv::ShortConv;

/// What mixes the tokens of a text.
#[derive(Debug)]
enum Mixer {
    Attention(Box<SelfAttention>),
    Latent(Box<LatentAttention>),
    ShortConv(Box<ShortConv>),
    DeltaNet(Box<DeltaNet>),
    Mamba(Box<Mamba>),
    Both(Box<AttentionAndMamba>),
}

/// Attention and Mamba 2 side by side, whose results are added.
#[derive(Debug)]
struct AttentionAndMamba {
    attention: SelfAttention,
    mamba: Mamba,
    /// Factors of what attention gets, of what it makes, and of what Mamba 2 makes.
    factors: [f64; 3],
}

impl AttentionAndMamba {
    fn forward(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
        keys: &mut SharedKeys,
    ) -> Result<DTensor> {
        let [of_attention, of_states] = match turns.map(cache::both).transpose()? {
            Some(turns) => turns.map(Some),
            None => [None, None],
        };
        let [into, out, states] = self.factors;
        let mixed = self.attention.forward(&scaled(x, into)?, angles, of_attention, keys)?;
        let read = self.mamba.forward(x, angles.documents(), of_states)?;
        scaled(&read, states)?.add(&scaled(&mixed, out)?)
    }
}

impl Mixer {
    /// That of the layer of this number, whose path the builder has, if it has one.
    fn new(config: &Config, layer: usize, vb: &MeshVarBuilder) -> Result<Option<Self>> {
        let token_ranks = vb.mesh().size_of(TOKEN_AXIS).unwrap_or(1);
        if let Some(refusal) = config.refusal_of_token_ranks(token_ranks) {
            return Err(Error::Layout(refusal));
        }
        Ok(Some(match config.parts.mixer(layer) {
            MixerKind::None => return Ok(None),
            MixerKind::Attention => {
                Self::Attention(SelfAttention::new(config, layer, &vb.pp("self_attn"))?.into())
            }
            MixerKind::Latent(widths) => {
                Self::Latent(LatentAttention::new(config, widths, &vb.pp("self_attn"))?.into())
            }
            MixerKind::DeltaNet(heads) => {
                Self::DeltaNet(Box::new(DeltaNet::new(config, heads, &vb.pp("linear_attn"))?))
            }
            MixerKind::Both(heads) => {
                let Multipliers { attention_in, attention_out, states_out, .. } = config.parts.factors;
                Self::Both(Box::new(AttentionAndMamba {
                    attention: SelfAttention::new(config, layer, &vb.pp("self_attn"))?,
                    mamba: Mamba::new(config, heads, &vb.pp("mamba"))?,
                    factors: [attention_in, attention_out, states_out],
                }))
            }
            MixerKind::Mamba(heads) => Self::Mamba(Box::new(Mamba::new(config, heads, &vb.pp("mamba"))?)),
            MixerKind::ShortConv { taps } => {
                Self::ShortConv(Box::new(ShortConv::new(config, taps, &vb.pp("conv"))?))
            }
        }))
    }

    /// What it adds to states `[batch, tokens, hidden]`.
    fn forward(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
        keys: &mut SharedKeys,
    ) -> Result<DTensor> {
        match self {
            Self::Attention(attention) => attention.forward(x, angles, turns, keys),
            Self::Latent(attention) => attention.forward(x, angles, turns),
            Self::ShortConv(conv) => conv.forward(x, angles.documents(), turns),
            Self::DeltaNet(delta) => delta.forward(x, angles.documents(), turns),
            Self::Mamba(mamba) => mamba.forward(x, angles.documents(), turns),
            Self::Both(both) => both.forward(x, angles, turns, keys),
        }
    }
}

/// What a layer has beside hidden states.
pub(crate) struct LayerInputs<'a> {
    /// Its embeddings `[batch, tokens, width]` of the tokens, if layers have some.
    pub(crate) embeddings: Option<&'a DTensor>,
    /// The keys and values of layers before it that others use too, to which it adds its own if others do.
    pub(crate) keys: &'a mut SharedKeys,
}

/// A mixer of tokens, such as attention, and a feed-forward network, or one of them.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    /// Before and after the mixer, before and after the feed-forward layer.
    norms: [Option<Norm>; 4],
    mixer: Option<Mixer>,
    feed_forward: Option<FeedForward>,
    /// The router of the experts, in a model that learns their balance.
    router: Option<DecoderRouter>,
    branch_scale: f64,
    embedding_gate: Option<EmbeddingGate>,
    /// A number that multiplies the states behind the layer.
    scalar: Option<DTensor>,
    /// Whether the feed-forward network has the states that attention has.
    is_parallel: bool,
}

impl DecoderLayer {
    /// The layer of this number at the builder's path.
    pub(crate) fn new(config: &Config, layer: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let parts = &config.parts;
        let norm = |name: Option<&str>| {
            name.map(|name| Norm::new(config.hidden_size, config, &vb.pp(name))).transpose()
        };
        let [a, b, c, d] = match parts.norms.names() {
            [one, ..] if parts.norms == Norms::One && parts.has_feed_forward(layer) => {
                [None, None, one, None]
            }
            names => names,
        };
        let mixer = Mixer::new(config, layer, vb)?;
        let loads = match &mixer {
            Some(Mixer::Attention(attention)) if vb.shares().is_none() => {
                attention.unlike_loads(config, vb)?
            }
            _ => Vec::new(),
        };
        Ok(Self {
            norms: [norm(a)?, norm(b)?, norm(c)?, norm(d)?],
            mixer,
            feed_forward: parts
                .has_feed_forward(layer)
                .then(|| FeedForward::new(config, layer, &loads, vb))
                .transpose()?,
            router: None,
            branch_scale: parts.branch_scale,
            embedding_gate: EmbeddingGate::new(config, vb)?,
            scalar: parts
                .layer_scalar
                .then(|| vb.frozen().get(1, LAYER_SCALAR, Init::Const(1.0), Replicate, false))
                .transpose()?,
            is_parallel: parts.norms == Norms::Shared,
        })
    }

    /// The layer of this number, which learns the balance of its experts.
    pub(crate) fn balanced(config: &Config, layer: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let made = Self::new(config, layer, vb)?;
        let router = |experts| DecoderRouter::new(config.hidden_size, experts, &vb.pp("mlp"));
        Ok(Self { router: config.parts.experts(layer).map(router).transpose()?, ..made })
    }

    /// The states `[batch, tokens, hidden]` after this layer. With `turns`, the tokens of the one row belong to several
    /// texts, one behind another, and follow those that each has in the cache.
    pub(crate) fn forward(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
        LayerInputs { embeddings, keys }: LayerInputs<'_>,
    ) -> Result<DTensor> {
        self.ended(&self.computed(x, angles, turns, keys)?, embeddings)
    }

    /// The states after the mixer and the feed-forward network.
    pub(crate) fn computed(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
        keys: &mut SharedKeys,
    ) -> Result<DTensor> {
        if let (true, Some(mixer), Some(feed_forward)) = (self.is_parallel, &self.mixer, &self.feed_forward) {
            let [before, ..] = &self.norms;
            let normed = through(before, x)?;
            let mixed = self.add(x, &mixer.forward(&normed, angles, turns, keys)?)?;
            return self.add(&mixed, &feed_forward.forward(&normed, x)?);
        }
        if let ([first, between, Some(second), after], Some(mixer), Some(network)) =
            (&self.norms, &self.mixer, &self.feed_forward)
        {
            let mixed = through(between, &mixer.forward(&through(first, x)?, angles, turns, keys)?)?;
            let [x, normed] = second.forward_sum(x, &scaled(&mixed, self.branch_scale)?)?;
            return self.add(&x, &through(after, &network.forward(&normed, &x)?)?);
        }
        self.fed(&self.mixed(x, angles, turns, keys)?)
    }

    /// The states after this layer, and the sums of its router; with `recompute`, nothing between is kept for the backward pass.
    pub(crate) fn with_sums(
        self: &Arc<Self>,
        x: &DTensor,
        angles: &Angles,
        recompute: bool,
    ) -> Result<[DTensor; 2]> {
        let run = |part: fn(&Self, &DTensor, &Angles) -> Result<DTensor>, x: &DTensor| match recompute {
            true => {
                let (layer, angles) = (self.clone(), angles.clone());
                nn::recompute(x, move |x| part(&layer, x, &angles))
            }
            false => part(self, x, angles),
        };
        let x = run(|layer, x, angles| layer.mixed(x, angles, None, &mut SharedKeys::new()), x)?;
        Ok([run(|layer, x, _| layer.ended(&layer.fed(x)?, None), &x)?, run(|layer, x, _| layer.sums(x), &x)?])
    }

    /// The states after the mixer.
    pub(crate) fn mixed(
        &self,
        x: &DTensor,
        angles: &Angles,
        turns: Option<Vec<LayerTokens<'_>>>,
        keys: &mut SharedKeys,
    ) -> Result<DTensor> {
        let ([before, after, ..], Some(mixer)) = (&self.norms, &self.mixer) else { return Ok(x.clone()) };
        self.add(x, &through(after, &mixer.forward(&through(before, x)?, angles, turns, keys)?)?)
    }

    /// The states after the feed-forward network, of those after the mixer.
    pub(crate) fn fed(&self, x: &DTensor) -> Result<DTensor> {
        let ([.., before, after], Some(network)) = (&self.norms, &self.feed_forward) else {
            return Ok(x.clone());
        };
        self.add(x, &through(after, &network.forward(&through(before, x)?, x)?)?)
    }

    /// The states after the embeddings of the layer, of those after the feed-forward network.
    pub(crate) fn ended(&self, x: &DTensor, embeddings: Option<&DTensor>) -> Result<DTensor> {
        let mut made = x.clone();
        if let Some(gate) = &self.embedding_gate {
            let embeddings =
                embeddings.ok_or_else(|| Error::Layout("a layer without its embeddings".into()))?;
            made = self.add(&made, &gate.forward(&made, embeddings)?)?;
        }
        self.scalar.as_ref().map_or(Ok(made.clone()), |scalar| made.mul(scalar))
    }

    /// The sums of the router, of the states after the mixer.
    fn sums(&self, x: &DTensor) -> Result<DTensor> {
        let router = self
            .router
            .as_ref()
            .ok_or_else(|| Error::Layout("a layer without experts has no balance".into()))?;
        let [.., before, _] = &self.norms;
        router.sums(&through(before, x)?)
    }

    fn add(&self, x: &DTensor, branch: &DTensor) -> Result<DTensor> {
        x.add(&scaled(branch, self.branch_scale)?)
    }
}

/// What a norm makes of states, if there is one.
fn through(norm: &Option<Norm>, x: &DTensor) -> Result<DTensor> {
    norm.as_ref().map_or_else(|| Ok(x.clone()), |norm| norm.forward(x))
}
