//! Embeddings of tokens that each layer has of its own, and what it makes of them.

use candle_nn::Activation;
use candle_shard::nn::MeshVarBuilder;
use candle_shard::{DTensor, Result};

use crate::config::Config;
use crate::config::parts::LayerEmbeddingSizes;
use crate::config::tensors::{EMBEDDING_GATE, LAYER_EMBEDDINGS};
use crate::norm::Norm;
use crate::projection::{Projection, TokenTable};

/// The embeddings of all layers side by side, joined with projections of the first hidden states.
#[derive(Debug)]
pub(crate) struct LayerEmbeddings {
    table: TokenTable,
    projection: Projection,
    norm: Norm,
    config: Config,
}

impl LayerEmbeddings {
    /// Those of a model at the builder's path, if its layers have some.
    pub(crate) fn new(config: &Config, vb: &MeshVarBuilder) -> Result<Option<Self>> {
        let Some(LayerEmbeddingSizes { width, .. }) = config.parts.layer_embeddings else { return Ok(None) };
        let [table, projection, norm] = LAYER_EMBEDDINGS.map(|name| vb.pp(name));
        Ok(Some(Self {
            table: Self::table(config, &table)?,
            projection: Self::projection(config, &projection)?,
            norm: Norm::new(width, config, &norm)?,
            config: config.clone(),
        }))
    }

    /// The table at the builder's path.
    pub(crate) fn table(config: &Config, vb: &MeshVarBuilder) -> Result<TokenTable> {
        let LayerEmbeddingSizes { tokens, width } = sizes(config);
        TokenTable::new(tokens, config.num_hidden_layers * width, vb)
    }

    /// The projection of the first hidden states at the builder's path.
    pub(crate) fn projection(config: &Config, vb: &MeshVarBuilder) -> Result<Projection> {
        let all = config.num_hidden_layers * sizes(config).width;
        Projection::new(config.hidden_size, all, false, vb)
    }

    /// The embeddings `[batch, tokens, layers · width]` of tokens whose first hidden states are `h`.
    pub(crate) fn forward(&self, tokens: &DTensor, h: &DTensor) -> Result<DTensor> {
        joined(&self.config, &self.norm, &self.table.forward(tokens)?, &self.projection.forward(h)?)
    }
}

/// Rows of the table, and projections of hidden states behind the norm of each layer's part.
pub(crate) fn joined(config: &Config, norm: &Norm, rows: &DTensor, projected: &DTensor) -> Result<DTensor> {
    let width = sizes(config).width;
    let projected = projected.affine((config.hidden_size as f64).powf(-0.5), 0.0)?;
    let projected = norm.forward(&projected.split_units(2, width)?)?.flatten_from(2)?;
    projected.add(&rows.affine((width as f64).sqrt(), 0.0)?)?.affine(0.5f64.sqrt(), 0.0)
}

fn sizes(config: &Config) -> LayerEmbeddingSizes {
    config.parts.layer_embeddings.unwrap_or(LayerEmbeddingSizes { tokens: 0, width: 0 })
}

/// What a layer adds of its embeddings, as much as its hidden states say.
#[derive(Debug)]
pub(crate) struct EmbeddingGate {
    gate: Projection,
    projection: Projection,
    norm: Norm,
    activation: Activation,
}

impl EmbeddingGate {
    /// That of the layer at the builder's path, if layers have embeddings.
    pub(crate) fn new(config: &Config, vb: &MeshVarBuilder) -> Result<Option<Self>> {
        let Some(LayerEmbeddingSizes { width, .. }) = config.parts.layer_embeddings else { return Ok(None) };
        let (hidden, [gate, projection, norm]) = (config.hidden_size, EMBEDDING_GATE.map(|name| vb.pp(name)));
        Ok(Some(Self {
            gate: Projection::new(hidden, width, false, &gate)?,
            projection: Projection::new(width, hidden, false, &projection)?,
            norm: Norm::new(hidden, config, &norm)?,
            activation: config.parts.activation,
        }))
    }

    /// What it adds to states `[batch, tokens, hidden]`, with embeddings `[batch, tokens, width]`.
    pub(crate) fn forward(&self, x: &DTensor, embeddings: &DTensor) -> Result<DTensor> {
        let opened = self.gate.forward(x)?.activation(self.activation)?.mul(embeddings)?;
        self.norm.forward(&self.projection.forward(&opened)?)
    }
}
