use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Result, Tensor, bail};

use super::floats::FloatPanels;
use super::format;
use super::scaled::{ScaledCodes, ScaledFormat};
use super::tiles::Tiles;

/// A quantized weight `[rows, columns]`, ready for [`quantized_linear`](crate::quantized_linear). Clones share memory.
///
/// On the CPU its blocks are packed for the processor's vectors: the same numbers in another order, and scales of six
/// bits in a byte each.
#[derive(Debug, Clone)]
pub struct QuantizedMatrix(pub(super) Arc<MatrixStorage>);

#[derive(Debug)]
pub(super) enum MatrixStorage {
    /// On the CPU.
    Tiles(Tiles),
    /// On other devices, as candle holds it.
    Blocks(Arc<QTensor>),
    /// Codes with scales, on any device.
    Scaled(ScaledCodes),
}

impl QuantizedMatrix {
    /// Packs a weight, and frees its blocks as files have them.
    ///
    /// # Errors
    /// If the tensor has another number of dims than two, no columns, or a type that is [not taken](Self::takes).
    pub fn new(weight: QTensor) -> Result<Self> {
        let (rows, columns) = weight.shape().dims2()?;
        if !Self::takes(weight.dtype()) {
            bail!(
                "{:?} is no type of quantized weights; convert the weight, for example to Q8_0",
                weight.dtype()
            );
        }
        Ok(Self(Arc::new(match weight.device() {
            Device::Cpu => {
                MatrixStorage::Tiles(Tiles::new(weight.dtype(), [rows, columns], &weight.data()?)?)
            }
            _ => MatrixStorage::Blocks(Arc::new(weight)),
        })))
    }

    /// Packs a weight `dims` from its blocks, as files have them.
    ///
    /// # Errors
    /// If there are other bytes than those of the weight, no columns, or the type is [not taken](Self::takes).
    pub fn of_blocks(dtype: GgmlDType, dims: [usize; 2], blocks: &[u8], device: &Device) -> Result<Self> {
        if device.is_cpu() {
            return Ok(Self(Arc::new(MatrixStorage::Tiles(Tiles::new(dtype, dims, blocks)?))));
        }
        let storage = QStorage::from_data(Cow::Borrowed(blocks), device, dtype)?;
        Self::new(QTensor::new(storage, (dims[0], dims[1]))?)
    }

    /// Holds rows and columns of a weight of codes with scales, as their [bytes](ScaledFormat) are. It is multiplied by
    /// [`dequantized_linear`](crate::dequantized_linear) alone.
    ///
    /// # Errors
    /// If there are other bytes than those of the part, or the part is empty.
    pub fn scaled(
        format: Arc<ScaledFormat>,
        part: [Range<usize>; 2],
        bytes: Vec<u8>,
        device: &Device,
    ) -> Result<Self> {
        Ok(Self(Arc::new(MatrixStorage::Scaled(ScaledCodes::new(format, part, bytes, device)?))))
    }

    /// Returns whether weights may have this type: `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q8_0`, and `Q2K` to `Q6K`.
    pub fn takes(dtype: GgmlDType) -> bool {
        format::layout(dtype).is_some()
    }

    /// The rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        match &*self.0 {
            MatrixStorage::Tiles(tiles) => [tiles.rows, tiles.columns],
            MatrixStorage::Blocks(weight) => [weight.shape().dims()[0], weight.shape().dims()[1]],
            MatrixStorage::Scaled(codes) => codes.dims(),
        }
    }

    /// The type of the blocks; `None` for codes with [scales](Self::scaled).
    pub fn dtype(&self) -> Option<GgmlDType> {
        match &*self.0 {
            MatrixStorage::Tiles(tiles) => Some(tiles.dtype),
            MatrixStorage::Blocks(weight) => Some(weight.dtype()),
            MatrixStorage::Scaled(_) => None,
        }
    }

    /// The bytes in memory. On the CPU they are those of the blocks of the rows, up to a multiple of 16 rows, and four
    /// bytes more for each block of `Q3K`, `Q4K` and `Q5K`.
    pub fn bytes(&self) -> usize {
        match &*self.0 {
            MatrixStorage::Tiles(tiles) => tiles.bytes(),
            MatrixStorage::Blocks(weight) => weight.storage_size_in_bytes(),
            MatrixStorage::Scaled(codes) => codes.bytes(),
        }
    }

    /// Returns the floats that the weight stands for, with candle's bits, on its device.
    pub fn dequantize(&self) -> Result<Tensor> {
        match &*self.0 {
            MatrixStorage::Tiles(tiles) => {
                Tensor::from_vec(tiles.dequantize(), (tiles.rows, tiles.columns), &Device::Cpu)
            }
            MatrixStorage::Blocks(weight) => weight.dequantize(&weight.device()),
            MatrixStorage::Scaled(codes) => codes.dequantize(),
        }
    }

    /// Returns the floats that some rows stand for, one row after the other.
    ///
    /// # Errors
    /// If a row is outside of the weight.
    pub fn rows(&self, rows: &[u32]) -> Result<Vec<f32>> {
        let [count, columns] = self.dims();
        if let Some(row) = rows.iter().find(|&&row| row as usize >= count) {
            bail!("row {row} is outside of a quantized weight [{count}, {columns}]");
        }
        match &*self.0 {
            MatrixStorage::Tiles(tiles) => {
                let mut out = vec![0.0; rows.len() * columns];
                for (&row, out) in rows.iter().zip(out.chunks_exact_mut(columns)) {
                    tiles.dequantize_row(row as usize, out);
                }
                Ok(out)
            }
            MatrixStorage::Blocks(weight) => {
                let rows = Tensor::new(rows, &weight.device())?;
                weight.embedding(&rows)?.flatten_all()?.to_vec1()
            }
            MatrixStorage::Scaled(codes) => codes.rows(rows),
        }
    }
}
