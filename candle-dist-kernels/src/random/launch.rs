//! What the kernels of `draw.cu` are called with.
use std::ops::Range;

use candle_core::{DType, Result, bail};

use super::distribution::Distribution;
use super::grid::ElementGrid;
use super::stream::Stream;

/// The text of the kernels.
pub const SOURCE: &str = concat!(include_str!("words.cu"), include_str!("draw.cu"));

/// A launch of a kernel that draws a block of a random tensor, as f32 or f64.
#[derive(Clone, Debug, PartialEq)]
pub struct DrawLaunch {
    /// The name of the kernel.
    pub name: &'static str,
    /// The elements of the block.
    pub count: u64,
    /// The first element of the block in the whole tensor.
    pub base: u64,
    /// The sizes of the block's dims, then their strides in the whole tensor.
    pub dims: Vec<u64>,
    /// The seed, the id and the first element of the stream.
    pub stream: [u64; 3],
    /// The distribution's parameters, which are rounded to the kernel's type.
    pub parameters: [f64; 2],
    /// The blocks of threads of the launch.
    pub blocks: u32,
}

impl DrawLaunch {
    /// The threads of a block of threads.
    pub const THREADS: u32 = 128;

    /// Returns the launch for the block `block` of a tensor of shape `global_shape`. Only f64 is drawn in f64.
    ///
    /// # Errors
    /// If the block is not in the tensor, or has more elements than a device can address.
    pub fn new(
        stream: Stream,
        dist: Distribution,
        global_shape: &[usize],
        block: &[Range<usize>],
        dtype: DType,
    ) -> Result<Self> {
        let global = ElementGrid::new(global_shape)?;
        global.check_block(block)?;
        let wide = u64::from(dtype == DType::F64);
        // A thread draws as many elements as there are in one block of 16 words.
        let (names, words, parameters) = match dist {
            Distribution::Uniform { lo, up } => (["draw_uniform_f32", "draw_uniform_f64"], 1, [lo, up - lo]),
            Distribution::Normal { mean, stdev } => {
                (["draw_normal_f32", "draw_normal_f64"], 2, [mean, stdev])
            }
            Distribution::Bernoulli { p } => (["draw_bernoulli_f32", "draw_bernoulli_f64"], 1, [p, 0.0]),
        };
        let count = block.iter().map(|range| range.len() as u64).product::<u64>();
        let threads = count.div_ceil(16 / (words << wide));
        let Ok(blocks) = u32::try_from(threads.div_ceil(Self::THREADS.into())) else {
            bail!("a block of shape {block:?} has more elements than a device can draw at once");
        };
        let (base, dims) = global.merged(block);
        Ok(Self {
            name: names[wide as usize],
            count,
            base,
            dims: dims.iter().map(|&(size, _)| size).chain(dims.iter().map(|&(_, stride)| stride)).collect(),
            stream: [stream.seed, stream.id, stream.first],
            parameters,
            blocks,
        })
    }
}
