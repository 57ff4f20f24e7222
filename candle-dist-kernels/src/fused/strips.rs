//! Strips of many tensors, copied to new memory in one launch.
use super::call::KernelText;
use super::emulated;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, DType, Layout, Result, Shape, bail};
use candle_dist_base::{StripBuffer, StripCopy};

/// The strips of a launch, and the words of a block: as in `strips.cu`.
const STRIPS: usize = 64;
const WORDS: usize = 4096;
const THREADS: usize = 256;
/// The bytes of `Strips`.
#[cfg(feature = "cuda")]
const SIZE: usize = STRIPS * (6 * 8 + 2 * 4) + 8;

/// Memory from which one launch copies strips.
pub trait StripStorage: BackendStorage<Device: BackendDevice<Storage = Self>> + Sized {
    /// Fills new memory on a device.
    ///
    /// # Errors
    /// If a strip leaves its memory, has another dtype, or is on another device; if the launch fails.
    fn copy_strips(device: &Self::Device, buffers: &[StripBuffer<'_, Self>]) -> Result<Vec<Self>>;
}

/// A strip whose elements have addresses.
struct PlacedStrip {
    from: u64,
    to: u64,
    rows: usize,
    len: usize,
    steps: [usize; 2],
    words: StripWords,
}

/// What is copied.
#[derive(Clone, Copy, PartialEq)]
enum StripWords {
    /// Elements of this many bytes each.
    Elements(usize),
    /// 16-bit floats of this dtype, which become f32.
    Widened(DType),
}

impl StripWords {
    /// What is copied from one dtype to another; `None` if no kernel does it.
    fn of(from: DType, to: DType) -> Option<Self> {
        match (from, to) {
            (DType::F16 | DType::BF16, DType::F32) => Some(Self::Widened(from)),
            _ => (from == to).then(|| Self::Elements(from.size_in_bytes())),
        }
    }
}

/// Returns whether strips of one dtype are copied to memory of another.
pub fn copies_strips(from: DType, to: DType) -> bool {
    StripWords::of(from, to).is_some()
}

/// Checks the strips of new memory, and returns those that have elements.
fn checked<'b, 'a, S: BackendStorage>(
    buffer: &'b StripBuffer<'a, S>,
    len_of: impl Fn(&S) -> usize,
) -> Result<Vec<(&'b StripCopy<'a, S>, StripWords)>> {
    let mut all = Vec::with_capacity(buffer.strips.len());
    for strip in &buffer.strips {
        let &StripCopy { source, rows, len, from, to } = strip;
        if rows * len == 0 {
            continue;
        }
        let Some(words) = StripWords::of(source.dtype(), buffer.dtype) else {
            bail!("strips of {:?} are not copied to {:?}", source.dtype(), buffer.dtype)
        };
        let ends_at = |(start, step): (usize, usize)| {
            step.checked_mul(rows - 1).and_then(|last| last.checked_add(start)?.checked_add(len))
        };
        let is_inside = |place, room: usize| ends_at(place).is_some_and(|end| end <= room);
        if !is_inside(from, len_of(source)) || !is_inside(to, buffer.total) {
            bail!("{rows} runs of {len} elements, from {from:?} to {to:?}, leave their memory");
        }
        all.push((strip, words));
    }
    Ok(all)
}

impl PlacedStrip {
    fn new<S>(
        strip: &StripCopy<'_, S>,
        words: StripWords,
        [source, made]: [u64; 2],
        [of, to]: [DType; 2],
    ) -> Self {
        let at = |base: u64, start: usize, dtype: DType| base + (start * dtype.size_in_bytes()) as u64;
        let StripCopy { rows, len, from, to: place, .. } = *strip;
        // One run, or runs that lie behind each other, have no distance.
        let is_one = rows == 1 || from.1 == len && place.1 == len;
        let (rows, len) = if is_one { (1, rows * len) } else { (rows, len) };
        let steps = if is_one { [len; 2] } else { [from.1, place.1] };
        Self { from: at(source, from.0, of), to: at(made, place.0, to), rows, len, steps, words }
    }

    /// The code of the words in the text, and how many elements a word has.
    fn word(&self) -> (u32, usize) {
        match self.words {
            StripWords::Widened(DType::F16) => (32, 1),
            StripWords::Widened(_) => (33, 1),
            StripWords::Elements(bytes) => {
                let sizes = [self.from, self.to, (self.len * bytes) as u64];
                let steps = self.steps.map(|step| (step * bytes) as u64);
                let fits = |word: u64| sizes.iter().chain(&steps).all(|size| size.is_multiple_of(word));
                let word = [16, 8, 4, 2].into_iter().find(|&word| word as usize >= bytes && fits(word));
                let word = word.unwrap_or(bytes as u64);
                (word as u32, word as usize / bytes)
            }
        }
    }
}

/// The structures of the launches that copy these strips, and the blocks of each.
fn launches(strips: &[PlacedStrip]) -> Result<Vec<(Vec<u8>, usize)>> {
    strips.chunks(STRIPS).map(structure).collect()
}

/// The structure `Strips` of the text, and the number of blocks.
fn structure(strips: &[PlacedStrip]) -> Result<(Vec<u8>, usize)> {
    let mut places = [[0u64; STRIPS]; 6];
    let mut codes = [[0u32; STRIPS]; 2];
    let mut blocks = 0;
    for (at, strip) in strips.iter().enumerate() {
        let (code, each) = strip.word();
        let count = strip.rows * strip.len / each;
        let [from_step, to_step] = strip.steps;
        let sizes = [count, strip.len / each, from_step / each, to_step / each].map(|size| size as u64);
        for (places, place) in places.iter_mut().zip([strip.from, strip.to].into_iter().chain(sizes)) {
            places[at] = place;
        }
        codes[0][at] = blocks as u32;
        codes[1][at] = code;
        blocks += count.div_ceil(WORDS);
    }
    if blocks > i32::MAX as usize {
        bail!("copy_strips: {blocks} blocks are more than a launch has");
    }
    let mut bytes: Vec<u8> = places.as_flattened().iter().flat_map(|place| place.to_le_bytes()).collect();
    bytes.extend(codes.as_flattened().iter().flat_map(|code| code.to_le_bytes()));
    bytes.extend((strips.len() as u64).to_le_bytes());
    Ok((bytes, blocks))
}

/// In tests, by the kernels' text.
impl StripStorage for CpuStorage {
    fn copy_strips(_: &Self::Device, buffers: &[StripBuffer<'_, Self>]) -> Result<Vec<Self>> {
        let whole = Layout::contiguous(Shape::from(0));
        let (mut made, mut placed, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        for buffer in buffers {
            let mut storage = emulated::unwritten(buffer.total, buffer.dtype)?;
            let (to, room) = emulated::bytes_mut(&mut storage)?;
            memory.push((to, room));
            let len_of = |source: &Self| {
                emulated::bytes(source, &whole).map_or(0, |(_, bytes)| bytes / source.dtype().size_in_bytes())
            };
            for (strip, words) in checked(buffer, len_of)? {
                let (from, len) = emulated::bytes(strip.source, &whole)?;
                memory.push((from.cast_mut(), len));
                let places = [from.expose_provenance() as u64, to.expose_provenance() as u64];
                placed.push(PlacedStrip::new(strip, words, places, [strip.source.dtype(), buffer.dtype]));
            }
            made.push(storage);
        }
        for (structure, blocks) in launches(&placed)? {
            let name = (KernelText::Strips, "copy_strips".to_string());
            emulated::run_structures(name, vec![structure], memory.clone(), blocks, THREADS)?;
        }
        Ok(made)
    }
}

#[cfg(feature = "cuda")]
mod on_device {
    use super::*;
    use crate::fused::cuda::{bytes, bytes_mut, launch_structure};
    use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DevicePtrMut};
    use candle_core::{CudaDevice, CudaStorage};

    impl StripStorage for CudaStorage {
        fn copy_strips(device: &CudaDevice, buffers: &[StripBuffer<'_, Self>]) -> Result<Vec<Self>> {
            let (stream, gpu) = (device.cuda_stream(), device.cuda_stream().context().ordinal());
            let whole = Layout::contiguous(Shape::from(0));
            let mut made = Vec::with_capacity(buffers.len());
            for StripBuffer { dtype, total, .. } in buffers {
                // SAFETY: the strips of a buffer write all of its elements before anything reads them.
                made.push(unsafe { device.alloc_uninit(&Shape::from(*total), *dtype)? });
            }
            let (mut placed, mut sources) = (Vec::new(), Vec::new());
            for (at, buffer) in buffers.iter().enumerate() {
                let len_of = |source: &Self| {
                    bytes(source, &whole).map_or(0, |view| view.len() / source.dtype().size_in_bytes())
                };
                for (strip, words) in checked(buffer, len_of)? {
                    if strip.source.device.cuda_stream().context().ordinal() != gpu {
                        bail!("copy_strips: a source is on another GPU than GPU {gpu}, which copies it");
                    }
                    sources.push(bytes(strip.source, &whole)?);
                    placed.push((at, strip, words));
                }
            }
            let mut written = Vec::with_capacity(made.len());
            for storage in &mut made {
                written.push(bytes_mut(storage)?);
            }
            // Events of the memory are waited for here, and recorded behind the launches when these are dropped.
            let (to, to_orders): (Vec<u64>, Vec<_>) =
                written.iter_mut().map(|view| view.device_ptr_mut(&stream)).unzip();
            let (from, orders): (Vec<u64>, Vec<_>) =
                sources.iter().map(|view| view.device_ptr(&stream)).unzip();
            let placed = placed.into_iter().zip(from).map(|((at, strip, words), from)| {
                PlacedStrip::new(strip, words, [from, to[at]], [strip.source.dtype(), buffers[at].dtype])
            });
            for (structure, blocks) in launches(&placed.collect::<Vec<_>>())? {
                let kernel = (KernelText::Strips, "copy_strips");
                // SAFETY: `structure` writes the one of the text. All strips are in memory that is held and ordered by its events.
                unsafe { launch_structure::<SIZE>(device, kernel, &structure, blocks, THREADS) }?;
            }
            drop(orders);
            drop(to_orders);
            drop(written);
            Ok(made)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn words_are_as_wide_as_places_and_distances_allow() {
        let strip = |from, len, steps| PlacedStrip {
            from,
            to: 64,
            rows: 3,
            len,
            steps,
            words: StripWords::Elements(2),
        };
        let words = |strip: PlacedStrip| strip.word();
        assert_eq!(words(strip(32, 16, [16, 24])), (16, 8));
        assert_eq!(words(strip(32, 16, [16, 20])), (8, 4));
        assert_eq!(words(strip(36, 16, [16, 24])), (4, 2));
        assert_eq!(words(strip(32, 15, [16, 24])), (2, 1));
        let wide = PlacedStrip { words: StripWords::Widened(DType::BF16), ..strip(32, 16, [16, 16]) };
        assert_eq!(words(wide), (33, 1));
    }

    #[test]
    fn strips_that_leave_their_memory_are_refused() {
        let source = CpuStorage::F32(vec![0.0; 12]);
        let copied = |rows, len, from, to, dtype| {
            let strips = vec![StripCopy { source: &source, rows, len, from, to }];
            checked(&StripBuffer { dtype, total: 9, strips }, |_| 12).map(|all| all.len())
        };
        assert_eq!(copied(3, 3, (1, 4), (0, 3), DType::F32).unwrap(), 1);
        assert_eq!(copied(0, 3, (100, 4), (0, 3), DType::F32).unwrap(), 0);
        for (from, to, dtype) in [
            ((2, 4), (0, 3), DType::F32),
            ((1, 4), (1, 3), DType::F32),
            ((1, usize::MAX), (0, 3), DType::F32),
            ((1, 4), (0, 3), DType::F16),
        ] {
            assert!(copied(3, 3, from, to, dtype).is_err(), "{from:?} {to:?} {dtype:?}");
        }
    }
}
