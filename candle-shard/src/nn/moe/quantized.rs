//! Experts whose weights stay quantized, as files store them.
use super::OP;
use super::config::{MoEAxes, MoEConfig};
use super::expert_bytes::{ExpertBytes, ExpertMatrix};
use crate::kernels::{self, QuantizedMatrix};
use crate::layout::Sizes;
use crate::nn::place::AxisCut;
use crate::nn::quantized::WeightFormat;
use crate::nn::{MeshVarBuilder, Width};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The names of the weights of experts: gate, up and down.
pub(super) const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// The blocks of this rank's experts.
#[derive(Debug, Clone)]
pub(super) struct QuantizedExperts {
    source: ExpertSource,
    count: usize,
    has_gate: bool,
    hidden: usize,
    /// How the tensor axis cuts the hidden dim, which is between blocks.
    cut: Option<(usize, Sizes)>,
    /// Whether rows are multiplied as they are, since adapters learn.
    is_exact: bool,
}

#[derive(Debug, Clone)]
enum ExpertSource {
    /// The matrices of each expert on this rank; there are none if no column of the hidden dim is here.
    Held(HeldExperts),
    /// Some bytes on each rank of a fully sharding axis. They are gathered for each use.
    Sharded(Arc<ExpertBytes>),
}

/// The matrices of experts while they compute.
pub(super) type HeldExperts = Arc<[QuantizedExpert]>;

/// The matrices of an expert, or the part of them that is here.
#[derive(Debug, Clone)]
pub(super) struct QuantizedExpert {
    gate: Option<QuantizedMatrix>,
    up: QuantizedMatrix,
    down: QuantizedMatrix,
}

impl QuantizedExperts {
    /// Reads this rank's blocks; `None` if files do not store all weights in blocks, or a cut would fall inside of one.
    ///
    /// All ranks decide alike.
    pub(super) fn read(config: &MoEConfig, axes: &MoEAxes, vb: &MeshVarBuilder) -> Result<Option<Self>> {
        let &MoEConfig { width, hidden, experts, .. } = config;
        let first = usize::from(!config.expert_gate.has_gate());
        let blocks: Option<Vec<usize>> = NAMES[first..].iter().map(|name| vb.quantized_block(name)).collect();
        let Some(block) = blocks.as_ref().and_then(|blocks| blocks.last()).copied() else { return Ok(None) };
        let mesh = vb.mesh();
        let ranks = axes.tensor.map_or(1, |axis| mesh.shape()[axis]);
        if ranks > 1 && !hidden.is_multiple_of(block) {
            return Ok(None);
        }
        let Some(weights) = vb.stored() else { return Ok(None) };
        let names = NAMES.map(|name| vb.full_name(name));
        for (name, want) in names.iter().zip([[hidden, width], [hidden, width], [width, hidden]]).skip(first)
        {
            let (shape, want) = (weights.shape(name)?, [experts, want[0], want[1]]);
            if shape != want {
                return Err(Error::Plan(format!("{name} has shape {shape:?}, and the layer wants {want:?}")));
            }
        }
        if !matches!(vb.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            let dtype = vb.dtype().as_str();
            return Error::op(
                OP,
                format!("quantized experts in {dtype}: expected f32, bf16 or f16, or read floats"),
            );
        }
        let cut = match axes.tensor.filter(|_| ranks > 1) {
            Some(axis) => {
                let width = Width::new(hidden / block, block);
                let planned = axes.tensor_cut(0, width, vb)?.and_then(|cut| cut.sizes);
                Some((axis, planned.unwrap_or_else(|| width.cut(ranks).to_vec().into())))
            }
            None => None,
        };
        let of_rank = |(axis, sizes): &(usize, Sizes)| range(sizes, mesh.coordinate()[*axis]);
        let columns = cut.as_ref().map_or(0..hidden, of_rank);
        let mine = range(&axes.sizes, axes.experts.map_or(0, |axis| mesh.coordinate()[axis]));
        let count = mine.len();
        let part = |expert: usize, which: usize| {
            let name = &names[which];
            let format = match weights.stored_codes(name, Some(expert))? {
                Some(codes) => WeightFormat::Codes(codes),
                None => {
                    WeightFormat::Blocks(weights.quantized_dtype(name)?.ok_or_else(|| not_in_blocks(name))?)
                }
            };
            let (rows, all) = (columns.clone(), 0..width);
            let part = if which < 2 { [rows, all] } else { [all, rows] };
            Ok::<_, Error>(ExpertMatrix { name: name.clone(), expert, format, part })
        };
        let parts = mine.flat_map(|expert| (first..NAMES.len()).map(move |which| (expert, which)));
        let parts = parts.filter(|_| !columns.is_empty()).map(|(expert, which)| part(expert, which));
        let parts: Vec<ExpertMatrix> = parts.collect::<Result<_>>()?;
        let source = match vb.sharded_over().filter(|group| group.size() > 1 && !parts.is_empty()) {
            Some(group) => {
                let shared = ExpertBytes::read(parts, weights, group, vb.device())?;
                vb.count_quantized(shared.bytes());
                ExpertSource::Sharded(Arc::new(shared))
            }
            None => {
                let read = |of: &ExpertMatrix| {
                    let matrix =
                        of.format.read(weights, (&of.name, Some(of.expert)), &of.part, vb.device())?;
                    vb.count_quantized(matrix.bytes());
                    Ok(matrix)
                };
                let matrices = parts.iter().map(read).collect::<Result<_>>()?;
                ExpertSource::Held(experts_of(matrices, first == 0))
            }
        };
        let (has_gate, hidden) = (first == 0, columns.len());
        Ok(Some(Self { source, count, has_gate, hidden, cut, is_exact: vb.learns_adapters() }))
    }

    /// Returns the matrices. In a fully sharded unit all of its ranks call it, and they are gathered.
    pub(super) fn held(&self) -> Result<HeldExperts> {
        Ok(match &self.source {
            ExpertSource::Held(experts) => experts.clone(),
            ExpertSource::Sharded(shared) => experts_of(shared.gather()?, self.has_gate),
        })
    }

    /// Returns how dim `dim` of a tensor is cut as the hidden dim is.
    pub(super) fn hidden_cut(&self, dim: usize) -> Option<AxisCut> {
        let (axis, sizes) = self.cut.clone()?;
        Some(AxisCut { axis, dim, sizes: Some(sizes) })
    }

    /// Returns whether there is nothing to multiply: no row, or no column of the hidden dim. Then the results are zeros.
    pub(super) fn is_idle(&self, x: &Tensor) -> Result<bool> {
        Ok(x.dim(0)? == 0 || self.hidden == 0)
    }

    /// Returns how many experts are here.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Returns what gate, if there is one, and up make of rows `x` `[n, width]` that are sorted by expert, `counts` for each, where there is
    /// [something to multiply](Self::is_idle).
    pub(super) fn hidden(
        &self,
        held: &HeldExperts,
        x: &Tensor,
        counts: &[usize],
    ) -> Result<(Option<Tensor>, Tensor)> {
        let of = |expert: &QuantizedExpert| expert.gate.iter().chain([&expert.up]).cloned().collect();
        let made = self.products(held, x, counts, of)?;
        if made.dim(1)? == self.hidden {
            return Ok((None, made));
        }
        Ok((Some(made.narrow(1, 0, self.hidden)?), made.narrow(1, self.hidden, self.hidden)?))
    }

    /// Returns what down makes of their hidden values.
    pub(super) fn down(&self, held: &HeldExperts, inner: &Tensor, counts: &[usize]) -> Result<Tensor> {
        self.products(held, inner, counts, |expert| vec![expert.down.clone()])
    }

    /// Returns the products of each expert's rows with some of its matrices, one beside another.
    fn products(
        &self,
        held: &HeldExperts,
        x: &Tensor,
        counts: &[usize],
        of: impl Fn(&QuantizedExpert) -> Vec<QuantizedMatrix>,
    ) -> Result<Tensor> {
        let (mut made, mut start) = (Vec::new(), 0);
        for (expert, &count) in held.iter().zip(counts).filter(|(_, count)| **count > 0) {
            let matrices = of(expert);
            made.push(self.product(&x.narrow(0, start, count)?, &matrices.iter().collect::<Vec<_>>())?);
            start += count;
        }
        Ok(Tensor::cat(&made, 0)?)
    }

    /// Returns the products of rows with some matrices, one beside another.
    fn product(&self, x: &Tensor, matrices: &[&QuantizedMatrix]) -> Result<Tensor> {
        if !self.is_exact {
            return Ok(kernels::quantized_linear(x, matrices)?);
        }
        let made = matrices.iter().map(|matrix| kernels::dequantized_linear(x, matrix));
        Ok(Tensor::cat(&made.collect::<candle_core::Result<Vec<_>>>()?, 1)?)
    }
}

/// Returns experts of matrices that lie one behind another: gate, if there is one, up and down of each.
fn experts_of(matrices: Vec<QuantizedMatrix>, has_gate: bool) -> HeldExperts {
    let expert = |own: &[QuantizedMatrix]| match own {
        [gate, up, down] => {
            Some(QuantizedExpert { gate: Some(gate.clone()), up: up.clone(), down: down.clone() })
        }
        [up, down] => Some(QuantizedExpert { gate: None, up: up.clone(), down: down.clone() }),
        _ => None,
    };
    matrices.chunks(if has_gate { 3 } else { 2 }).filter_map(expert).collect()
}

fn not_in_blocks(name: &str) -> Error {
    Error::Plan(format!("{name} is not in blocks"))
}

/// Returns the range of a rank, of ranges of these sizes.
fn range(sizes: &[usize], rank: usize) -> Range<usize> {
    let start = sizes[..rank].iter().sum::<usize>();
    start..start + sizes[rank]
}
