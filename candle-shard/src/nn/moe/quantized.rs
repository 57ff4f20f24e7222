//! Experts whose weights stay quantized, as files store them.
use super::OP;
use super::config::{MoEAxes, MoEConfig};
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
    /// The matrices of each expert; `None` if no column of the hidden dim is here.
    own: Arc<[Option<QuantizedExpert>]>,
    hidden: usize,
    /// How the tensor axis cuts the hidden dim, which is between blocks.
    cut: Option<(usize, Sizes)>,
    /// Whether rows are multiplied as they are, since adapters learn.
    is_exact: bool,
}

/// The matrices of an expert, or the part of them that is here.
#[derive(Debug, Clone)]
struct QuantizedExpert {
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
        let read = |expert: usize| -> Result<Option<QuantizedExpert>> {
            if columns.is_empty() {
                return Ok(None);
            }
            let part = |which: usize, block: [Range<usize>; 2]| {
                let name = &names[which];
                let format = match weights.stored_codes(name, Some(expert))? {
                    Some(codes) => WeightFormat::Codes(codes),
                    None => WeightFormat::Blocks(
                        weights.quantized_dtype(name)?.ok_or_else(|| not_in_blocks(name))?,
                    ),
                };
                let matrix = format.read(weights, (name, Some(expert)), &block, vb.device())?;
                vb.count_quantized(matrix.bytes());
                Ok::<_, Error>(matrix)
            };
            let (rows, all) = (columns.clone(), 0..width);
            let of_hidden = |which: usize| part(which, [rows.clone(), all.clone()]);
            let gate = (first == 0).then(|| of_hidden(0)).transpose()?;
            let up = of_hidden(1)?;
            Ok(Some(QuantizedExpert { gate, up, down: part(2, [all.clone(), rows.clone()])? }))
        };
        let own = mine.map(read).collect::<Result<_>>()?;
        Ok(Some(Self { own, hidden: columns.len(), cut, is_exact: vb.learns_adapters() }))
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
        self.own.len()
    }

    /// Returns what gate, if there is one, and up make of rows `x` `[n, width]` that are sorted by expert, `counts` for each, where there is
    /// [something to multiply](Self::is_idle).
    pub(super) fn hidden(&self, x: &Tensor, counts: &[usize]) -> Result<(Option<Tensor>, Tensor)> {
        let made = self.products(x, counts, |expert| expert.gate.iter().chain([&expert.up]).collect())?;
        if made.dim(1)? == self.hidden {
            return Ok((None, made));
        }
        Ok((Some(made.narrow(1, 0, self.hidden)?), made.narrow(1, self.hidden, self.hidden)?))
    }

    /// Returns what down makes of their hidden values.
    pub(super) fn down(&self, inner: &Tensor, counts: &[usize]) -> Result<Tensor> {
        self.products(inner, counts, |expert| vec![&expert.down])
    }

    /// Returns the products of each expert's rows with some of its matrices, one beside another.
    fn products(
        &self,
        x: &Tensor,
        counts: &[usize],
        of: impl Fn(&QuantizedExpert) -> Vec<&QuantizedMatrix>,
    ) -> Result<Tensor> {
        let (mut made, mut start) = (Vec::new(), 0);
        for (expert, &count) in self.own.iter().zip(counts).filter(|(_, count)| **count > 0) {
            let Some(expert) = expert else { continue };
            made.push(self.product(&x.narrow(0, start, count)?, &of(expert))?);
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

fn not_in_blocks(name: &str) -> Error {
    Error::Plan(format!("{name} is not in blocks"))
}

/// Returns the range of a rank, of ranges of these sizes.
fn range(sizes: &[usize], rank: usize) -> Range<usize> {
    let start = sizes[..rank].iter().sum::<usize>();
    start..start + sizes[rank]
}
