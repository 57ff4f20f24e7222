//! What is copied from several tensors to new memory: the packing of communication, whose copies one kernel makes on CUDA devices.
use candle_core::DType;

/// `rows` runs of `len` elements of a tensor, with the start of the first run and the distance of the runs there and in new memory.
#[derive(Clone, Copy, Debug)]
pub struct StripCopy<'a, S> {
    /// Where the elements are.
    pub source: &'a S,
    /// The number of runs.
    pub rows: usize,
    /// The elements of a run.
    pub len: usize,
    /// The place of the first run in the source, and the distance of the next.
    pub from: (usize, usize),
    /// The same in the new memory.
    pub to: (usize, usize),
}

/// New memory of `total` elements. The strips fill all of them.
#[derive(Clone, Debug)]
pub struct StripBuffer<'a, S> {
    /// The dtype of the new memory. That of sources is the same; where it is f32, sources may be 16-bit floats.
    pub dtype: DType,
    /// The number of elements.
    pub total: usize,
    /// What fills them.
    pub strips: Vec<StripCopy<'a, S>>,
}
