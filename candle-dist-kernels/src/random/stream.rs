//! The words of a tensor.
use candle_core::{Result, bail};
use rand_chacha::ChaCha8Rng;
use rand_core::SeedableRng;

/// A named, endless sequence of random words: the part of a number's key besides its element index.
///
/// Use one stream per random tensor of a program, usually named by the tensor's path, and derive one per training step
/// with [`fold`](Stream::fold).
///
/// ```
/// use candle_dist_kernels::random::Stream;
///
/// let mask = Stream::new(42, "layers.0.dropout");
/// assert_eq!(mask.fold(7), Stream::new(42, "layers.0.dropout").fold(7));
/// assert_ne!(mask.fold(7), mask.fold(8));
/// assert_ne!(mask, Stream::new(42, "layers.1.dropout"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    pub(super) seed: u64,
    pub(super) id: u64,
    /// The element at which the stream starts.
    pub(super) first: u64,
}

impl Stream {
    /// Creates the stream called `name` under `seed`; its id is the 64-bit FNV-1a hash of the name.
    pub fn new(seed: u64, name: &str) -> Self {
        let id = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self { seed, id, first: 0 }
    }

    /// Derives the `n`-th stream from this one, for example the one of training step `n`.
    ///
    /// Folds nest, and their order matters: `s.fold(1).fold(2)` is not `s.fold(2).fold(1)`.
    pub fn fold(self, n: u64) -> Self {
        const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
        let id = mix64(mix64(self.id).wrapping_add(n.wrapping_add(1).wrapping_mul(GOLDEN_GAMMA)));
        Self { id, ..self }
    }

    /// Skips the first `elements` elements: returns the numbers of a tensor that begins there in a larger one.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist_kernels::random::{Distribution, Stream, sample_full};
    ///
    /// let (stream, even) = (Stream::new(0, "noise"), Distribution::Uniform { lo: 0.0, up: 1.0 });
    /// let whole = sample_full(stream, even, &[5, 2], DType::F32, &Device::Cpu)?;
    /// let last = sample_full(stream.skip(3 * 2), even, &[2, 2], DType::F32, &Device::Cpu)?;
    /// assert_eq!(last.to_vec2::<f32>()?, whole.narrow(0, 3, 2)?.to_vec2::<f32>()?);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn skip(self, elements: u64) -> Self {
        Self { first: self.first.saturating_add(elements), ..self }
    }

    /// Returns the numbers of a tensor of shape `dims` whose dim 0 goes along rows of a larger one, from row `first_row` on.
    ///
    /// Without `rows`, each entry of dim 0 is a row. With `rows`, it has several entries for each of that many rows, such
    /// as the tokens of a sequence.
    ///
    /// # Errors
    /// If dim 0 is not a multiple of `rows`.
    pub fn of_rows(self, first_row: usize, rows: Option<usize>, dims: &[usize]) -> Result<Self> {
        let each = match (rows, dims.first()) {
            (None, _) | (Some(0), Some(0)) => 1,
            (Some(rows), Some(&entries)) if rows > 0 && entries % rows == 0 => entries / rows,
            (Some(rows), _) => {
                bail!(
                    "random numbers of shape {dims:?} for {rows} rows: the first dim is not a multiple of the rows"
                )
            }
        };
        let row: usize = dims.iter().skip(1).product();
        Ok(self.skip((first_row as u64).saturating_mul(each as u64).saturating_mul(row as u64)))
    }

    pub(super) fn generator(self) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        let mut generator = ChaCha8Rng::from_seed(key);
        generator.set_stream(self.id);
        generator
    }
}

/// The finalizer of splitmix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014).
fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
