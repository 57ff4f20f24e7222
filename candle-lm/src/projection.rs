//! Layers whose weights are floats, or stay quantized as files store them.

use candle_shard::nn::{
    Embedding, FusedQkv, Heads, Linear, MeshVarBuilder, QuantizedEmbedding, QuantizedLinear, QuantizedQkv,
    Width,
};
use candle_shard::parallel::LayerKind;
use candle_shard::{DTensor, Replicate, Result, Shard};

use crate::LAYER_AXIS;

/// A linear layer.
#[derive(Debug)]
pub(crate) enum Projection {
    Dense(Linear),
    Quantized(QuantizedLinear),
}

impl Projection {
    /// The layer at the builder's path. A weight whose blocks `input` would cut is held as floats.
    pub(crate) fn new(
        input: impl Into<Width>,
        output: impl Into<Width>,
        bias: bool,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let (input, output) = (input.into(), output.into());
        let is_cut = matches!(vb.style().layout(LayerKind::Linear)?.weight, Shard(1));
        let fits = |block: usize| !is_cut || input.unit.is_multiple_of(block);
        Ok(match vb.quantized_block("weight").is_some_and(fits) {
            true => Self::Quantized(QuantizedLinear::new(input, output, bias, vb)?),
            false => Self::Dense(Linear::new(input, output, bias, vb)?),
        })
    }

    pub(crate) fn forward(&self, x: &DTensor) -> Result<DTensor> {
        match self {
            Self::Dense(layer) => layer.forward(x),
            Self::Quantized(layer) => layer.forward(x),
        }
    }

    /// The outputs of two layers that are cut alike for one input.
    pub(crate) fn forward_both(&self, other: &Self, x: &DTensor) -> Result<[DTensor; 2]> {
        match (self, other) {
            (Self::Quantized(first), Self::Quantized(second)) => {
                QuantizedLinear::forward_all([first, second], x)
            }
            _ => Ok([self.forward(x)?, other.forward(x)?]),
        }
    }
}

/// States times a factor.
pub(crate) fn scaled(x: &DTensor, factor: f64) -> Result<DTensor> {
    if factor == 1.0 { Ok(x.clone()) } else { x.affine(factor, 0.0) }
}

/// The columns between which the weight of a layer may be cut.
pub(crate) fn granule(vb: &MeshVarBuilder) -> usize {
    vb.quantized_block("weight").unwrap_or(1)
}

/// The width of a dim whose shards begin and end between blocks of `granule`, if that is possible.
pub(crate) fn in_blocks(size: usize, granule: usize) -> Width {
    if size.is_multiple_of(granule) { Width::new(size / granule, granule) } else { size.into() }
}

/// The heads with the gates among the query heads, and the columns of these between which they are cut so that the output projection is
/// cut between columns of `granule`, if that is possible.
pub(crate) fn with_gates(heads: Heads, is_gated: bool, granule: usize) -> (Heads, usize) {
    if !is_gated {
        return (heads, granule);
    }
    let Heads { query, dim, .. } = heads;
    // Whole heads that are a multiple of the granule.
    let unit = (1..=query).map(|heads| heads * dim).find(|columns| columns.is_multiple_of(granule));
    (Heads { query: 2 * query, ..heads }, 2 * unit.unwrap_or(dim))
}

/// Query, key and value projections.
#[derive(Debug)]
pub(crate) struct Qkv {
    layer: QkvLayer,
    is_gated: bool,
}

#[derive(Debug)]
enum QkvLayer {
    Dense(Box<FusedQkv>),
    Quantized(Box<QuantizedQkv>),
    /// Queries alone, and the width of a head.
    Queries {
        layer: Box<Projection>,
        width: Width,
        dim: usize,
    },
}

const NAMES: [&str; 3] = ["q_proj", "k_proj", "v_proj"];

impl Qkv {
    /// The layer at the builder's path, whose heads are cut where the output projection can be. Where they are gated, each query head is
    /// followed by its gate. Without values of their own these are the keys.
    pub(crate) fn new(
        hidden: usize,
        heads: Heads,
        [is_gated, has_values]: [bool; 2],
        bias: bool,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let names = if has_values { NAMES } else { [NAMES[0], NAMES[1], NAMES[1]] };
        let is_quantized = names.iter().all(|name| vb.pp(name).quantized_block("weight").is_some());
        Ok(match is_quantized {
            true => {
                let (heads, granule) = with_gates(heads, is_gated, granule(&vb.pp("o_proj")));
                let layer = QuantizedQkv::with_names(hidden, heads, granule, bias, names, vb)?;
                Self { layer: QkvLayer::Quantized(layer.into()), is_gated }
            }
            false => {
                let (heads, granule) = with_gates(heads, is_gated, 1);
                let layer = FusedQkv::with_names(hidden, heads, granule, bias, names, vb)?;
                Self { layer: QkvLayer::Dense(layer.into()), is_gated }
            }
        })
    }

    /// The projection of queries alone, whose keys and values are those of another layer with such heads.
    pub(crate) fn of_queries(hidden: usize, heads: Heads, bias: bool, vb: &MeshVarBuilder) -> Result<Self> {
        let path = vb.pp(NAMES[0]);
        let granule = if path.quantized_block("weight").is_some() { granule(&vb.pp("o_proj")) } else { 1 };
        let ranks = match path.style().layout(LayerKind::Linear)?.weight {
            Replicate => 1,
            _ => vb.mesh().size_of(LAYER_AXIS).unwrap_or(1),
        };
        let together = heads.together(ranks, granule);
        let width = Width::new(heads.query / together, together * heads.dim);
        let layer = Projection::new(hidden, width, bias, &path)?.into();
        Ok(Self { layer: QkvLayer::Queries { layer, width, dim: heads.dim }, is_gated: false })
    }

    /// Queries `[batch, heads, tokens, dim]`, and keys and values if they are made here.
    pub(crate) fn forward(&self, x: &DTensor) -> Result<(DTensor, Option<[DTensor; 2]>)> {
        let [q, k, v] = match &self.layer {
            QkvLayer::Dense(layer) => layer.forward(x)?,
            QkvLayer::Quantized(layer) => layer.forward(x)?,
            QkvLayer::Queries { layer, dim, .. } => {
                return Ok((layer.forward(x)?.split_units(2, *dim)?.transpose(1, 2)?, None));
            }
        };
        Ok((q, Some([k, v])))
    }

    /// The width of the output of all query heads.
    pub(crate) fn width(&self) -> Width {
        let Width { units, unit } = match &self.layer {
            QkvLayer::Dense(layer) => layer.width(),
            QkvLayer::Quantized(layer) => layer.width(),
            QkvLayer::Queries { width, .. } => *width,
        };
        Width::new(units, if self.is_gated { unit / 2 } else { unit })
    }
}

/// The table of tokens.
#[derive(Debug)]
pub(crate) enum TokenTable {
    Dense(Embedding),
    Quantized(QuantizedEmbedding),
}

impl TokenTable {
    /// The table at the builder's path.
    pub(crate) fn new(rows: usize, width: usize, vb: &MeshVarBuilder) -> Result<Self> {
        Ok(match vb.quantized_block("weight") {
            Some(_) => Self::Quantized(QuantizedEmbedding::new(rows, width, vb)?),
            None => Self::Dense(Embedding::new(rows, width, 1.0, vb)?),
        })
    }

    pub(crate) fn forward(&self, tokens: &DTensor) -> Result<DTensor> {
        match self {
            Self::Dense(table) => table.forward(tokens),
            Self::Quantized(table) => table.forward(tokens),
        }
    }

    /// The output layer that shares the table.
    pub(crate) fn tied(&self, vb: &MeshVarBuilder) -> Result<Projection> {
        Ok(match self {
            Self::Dense(table) => Projection::Dense(Linear::tied(table.weight(), vb)?),
            Self::Quantized(table) => Projection::Quantized(QuantizedLinear::tied(table, vb)?),
        })
    }
}
