//! What the kernels of `decode.cu` are called with.
use super::Scale;
use super::launch::PassLaunch;
use crate::device_text::with_prelude;
use candle_core::DType;

/// The text of the kernels. A line before it says the type of keys and values.
pub(super) const SOURCE: &str = with_prelude!("attention/decode.cu");

/// The dtypes, in the order of the kernels' numbers for them.
pub(super) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The most texts of a launch: constants of the text, as are the others.
pub(super) const TEXTS: usize = 16;
const GROUP: usize = 8;
const PART: usize = 256;
const TILE_KEYS: usize = 64;
const THREADS: u32 = 128;

/// The most columns of a row.
const MOST_COLUMNS: usize = 256;

/// The keys and values of a text. `TextCache` of the text.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CacheOfText {
    /// The addresses of the first key and the first value.
    pub(super) places: [u64; 2],
    /// From head to head and from token to token: of keys, then of values.
    pub(super) strides: [[i64; 2]; 2],
    pub(super) tokens: i64,
}

/// `Caches` of the text.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CachesOfTexts(pub(super) [CacheOfText; TEXTS]);

/// The parameters of both kernels. `Decode` of the text.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeCall {
    query_strides: [i64; 2],
    texts: i32,
    heads: i32,
    kv_heads: i32,
    dim: i32,
    width: i32,
    parts: i32,
    kind: i32,
    out_kind: i32,
    log_sums: i32,
    factor: f32,
    cap: f32,
    unused: i32,
}

/// The sizes of the rows of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeRows {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) width: usize,
}

impl DecodeCall {
    /// Returns the call for texts of these lengths, and a query with these distances of texts and of heads. `None` if the kernels do not
    /// have it, or need more than `most_shared` bytes of shared memory.
    pub(super) fn new(
        rows: DecodeRows,
        tokens: &[usize],
        query_strides: [usize; 2],
        (scale, log_sums): (Scale, bool),
        (dtype, most_shared): (DType, usize),
    ) -> Option<Self> {
        let DecodeRows { heads, kv_heads, dim, width } = rows;
        let kind = DTYPES.iter().position(|&known| known == dtype)? as i32;
        let (longest, [factor, cap]) = (tokens.iter().copied().max()?, scale.in_f32()?);
        let fits = (1..=MOST_COLUMNS).contains(&dim)
            && (1..=MOST_COLUMNS).contains(&width)
            && (1..=65_535).contains(&heads)
            && longest < 1 << 31;
        let made = fits.then(|| Self {
            query_strides: query_strides.map(|stride| stride as i64),
            texts: tokens.len() as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            dim: dim as i32,
            width: width as i32,
            parts: longest.div_ceil(PART).max(1) as i32,
            kind,
            out_kind: if log_sums { 0 } else { kind },
            log_sums: i32::from(log_sums),
            factor,
            cap,
            unused: 0,
        });
        made.filter(|made| made.attention().shared as usize <= most_shared)
    }

    /// The columns of a row of the result.
    pub(super) fn columns(&self) -> usize {
        (self.width + self.log_sums) as usize
    }

    /// The launch over the keys.
    pub(super) fn attention(&self) -> PassLaunch {
        let group = (self.heads / self.kv_heads) as usize;
        let stride = self.dim as usize | 1;
        let floats = (GROUP + TILE_KEYS) * stride + GROUP * TILE_KEYS + 3 * GROUP;
        PassLaunch {
            name: "decode_attention".to_string(),
            grid: [
                self.parts as u32,
                (self.kv_heads as usize * group.div_ceil(GROUP)) as u32,
                self.texts as u32,
            ],
            threads: THREADS,
            shared: (4 * floats) as u32,
        }
    }

    /// The launch that joins the parts, and the floats of all parts, if a text has several.
    pub(super) fn joined(&self) -> Option<(PassLaunch, usize)> {
        let rows = [self.texts, self.parts, self.heads].map(|n| n as usize).iter().product::<usize>();
        let floats = rows * (self.width as usize + 2);
        let launch = PassLaunch {
            name: "decode_joined".to_string(),
            grid: [self.heads as u32, self.texts as u32, 1],
            threads: THREADS,
            shared: 0,
        };
        (self.parts > 1).then_some((launch, floats))
    }
}
