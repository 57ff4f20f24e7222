//! Blocks of a quantized weight that a rank holds, by itself or together with the ranks of a fully sharding axis.
use super::format::WeightFormat;
use super::shared_bytes::SharedBytes;
use crate::kernels::{self, QuantizedMatrix};
use crate::nn::MeshVarBuilder;
use crate::{Error, Result, Weights};
use candle_core::{D, Device, Tensor};
use candle_dist::ProcessGroup;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// Blocks of rows and columns of a weight `[out, in]`.
#[derive(Debug, Clone)]
pub(super) struct WeightBlocks {
    source: BlockSource,
    rows: Range<usize>,
    /// Whether inputs are multiplied as they are, since adapters learn beside the weight.
    is_exact: bool,
}

#[derive(Debug, Clone)]
enum BlockSource {
    /// Without rows or columns.
    Empty,
    /// On this rank.
    Held(QuantizedMatrix),
    /// Some rows on each rank of a group, as files have their bytes. They are gathered for each use.
    Sharded(Arc<ShardedBlocks>),
}

#[derive(Debug)]
struct ShardedBlocks {
    bytes: SharedBytes,
    /// The rows of each rank.
    rows: Vec<Range<usize>>,
    columns: Range<usize>,
    format: WeightFormat,
    device: Device,
}

impl WeightBlocks {
    /// Reads rows and columns of the stored weight `name`, which must be `whole`.
    ///
    /// In a fully sharded unit each rank reads a part of the rows.
    pub(super) fn read(
        vb: &MeshVarBuilder,
        name: &str,
        whole: [usize; 2],
        [rows, columns]: [Range<usize>; 2],
    ) -> Result<Self> {
        let (weights, name, format) = stored(vb, name, whole)?;
        let source = match (rows.is_empty() || columns.is_empty(), vb.sharded_over()) {
            (true, _) => BlockSource::Empty,
            (false, Some(group)) if group.size() > 1 => {
                let sharded = ShardedBlocks::read(vb, &name, format, [&rows, &columns], group)?;
                BlockSource::Sharded(Arc::new(sharded))
            }
            _ => {
                let key = (weights.place(&name)?, rows.clone(), columns.clone());
                let read =
                    || format.read(weights, (&name, None), &[rows.clone(), columns.clone()], vb.device());
                BlockSource::Held(vb.quantized_matrix(key, read)?)
            }
        };
        Ok(Self { source, rows, is_exact: vb.learns_adapters() })
    }

    /// Returns the bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        match &self.source {
            BlockSource::Empty => 0,
            BlockSource::Held(matrix) => matrix.bytes(),
            BlockSource::Sharded(sharded) => sharded.bytes.own(),
        }
    }

    /// Returns the matrix, if there are rows and columns. In a fully sharded unit all of its ranks call it, and it is gathered.
    pub(super) fn matrix(&self) -> Result<Option<QuantizedMatrix>> {
        match &self.source {
            BlockSource::Empty => Ok(None),
            BlockSource::Held(matrix) => Ok(Some(matrix.clone())),
            BlockSource::Sharded(sharded) => sharded.gather().map(Some),
        }
    }

    /// Returns `x · weightᵀ` for these rows, with their matrix; `x` has the columns.
    pub(super) fn product_by(&self, matrix: &QuantizedMatrix, x: &Tensor) -> Result<Tensor> {
        Ok(match self.is_exact || matrix.dtype().is_none() {
            true => kernels::dequantized_linear(x, matrix)?,
            false => kernels::quantized_linear(x, &[matrix])?,
        })
    }

    /// Returns the products of several weights, for which `x` is rounded once.
    pub(super) fn products(all: &[(&Self, &QuantizedMatrix)], x: &Tensor) -> Result<SmallVec<[Tensor; 1]>> {
        if all.len() == 1 || all.iter().any(|(blocks, matrix)| blocks.is_exact || matrix.dtype().is_none()) {
            return all.iter().map(|(blocks, matrix)| blocks.product_by(matrix, x)).collect();
        }
        let matrices: Vec<&QuantizedMatrix> = all.iter().map(|(_, matrix)| *matrix).collect();
        let together = kernels::quantized_linear(x, &matrices)?;
        let mut first = 0;
        let part = |(blocks, _): &(&Self, &QuantizedMatrix)| {
            let part = together.narrow(D::Minus1, first, blocks.rows.len());
            first += blocks.rows.len();
            Ok::<_, Error>(part?)
        };
        all.iter().map(part).collect()
    }

    /// Returns the rows at `ids` (u32) of the whole weight as f32, and zeros for rows that are not here; `matrix` is that of these blocks.
    pub(super) fn rows_at(
        &self,
        matrix: Option<&QuantizedMatrix>,
        ids: &[u32],
        width: usize,
    ) -> Result<Vec<f32>> {
        let mut out = vec![0.0; ids.len() * width];
        let here = ids.iter().enumerate().filter(|&(_, &id)| self.rows.contains(&(id as usize)));
        let (places, rows): (Vec<usize>, Vec<u32>) =
            here.map(|(at, &id)| (at, id - self.rows.start as u32)).unzip();
        if rows.is_empty() {
            return Ok(out);
        }
        let found = matrix.ok_or_else(absent)?.rows(&rows)?;
        for (at, row) in places.into_iter().zip(found.chunks_exact(width)) {
            out[at * width..][..width].copy_from_slice(row);
        }
        Ok(out)
    }
}

pub(super) fn absent() -> Error {
    Error::Plan("a quantized weight without rows or columns is used".into())
}

impl ShardedBlocks {
    fn read(
        vb: &MeshVarBuilder,
        name: &str,
        format: WeightFormat,
        [rows, columns]: [&Range<usize>; 2],
        group: &ProcessGroup,
    ) -> Result<Self> {
        let weights = vb.stored().ok_or_else(absent)?;
        let device = vb.device();
        let most = rows.len().div_ceil(group.size());
        let part = |rank: usize| {
            let [start, end] = [rank, rank + 1].map(|rank| rows.start + (rank * most).min(rows.len()));
            start..end
        };
        let of_ranks: Vec<_> = (0..group.size()).map(part).collect();
        let mine = part(group.rank());
        let piece = if mine.is_empty() {
            SharedBytes::piece(Vec::new(), device)?
        } else {
            let block = [mine, columns.clone()];
            let key = (weights.place(name)?, block[0].clone(), block[1].clone());
            vb.quantized_bytes_of(key, || {
                SharedBytes::piece(format.read_bytes(weights, (name, None), &block)?, device)
            })?
        };
        let bytes = |rows: &Range<usize>| format.byte_count(&[rows.clone(), columns.clone()]);
        let sizes = of_ranks.iter().map(bytes).collect();
        let bytes = SharedBytes::new(piece, sizes, group, format!("the blocks of {name}"));
        let columns = columns.clone();
        Ok(Self { bytes, rows: of_ranks, columns, format, device: device.clone() })
    }

    fn gather(&self) -> Result<QuantizedMatrix> {
        self.format.join(&self.rows, &self.columns, self.bytes.gather()?, &self.device)
    }
}

/// Returns the files, the name of the parameter `name` there, which must be quantized and `whole`, and how it is stored.
pub(super) fn stored<'a>(
    vb: &'a MeshVarBuilder,
    name: &str,
    whole: [usize; 2],
) -> Result<(&'a Weights, String, WeightFormat)> {
    let name = vb.full_name(name);
    let Some(weights) = vb.stored() else {
        return Err(Error::Plan(format!(
            "{name} is quantized, and only weights in files are; build from weights"
        )));
    };
    let shape = weights.shape(&name)?;
    if shape != whole {
        return Err(Error::Plan(format!("{name} has shape {shape:?}, and the layer wants {whole:?}")));
    }
    if let Some(codes) = weights.stored_codes(&name, None)? {
        return Ok((weights, name, WeightFormat::Codes(codes)));
    }
    match weights.quantized_dtype(&name)? {
        Some(dtype) if QuantizedMatrix::takes(dtype) => Ok((weights, name, WeightFormat::Blocks(dtype))),
        Some(dtype) => Err(Error::Plan(format!(
            "{name} is stored as {dtype:?}, with which nothing is multiplied; build a layer that is not quantized"
        ))),
        None => Err(Error::Plan(format!("{name} is not quantized; build a layer that is not"))),
    }
}
