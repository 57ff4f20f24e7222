//! The kernels that draw random numbers on CUDA devices give the host's bits. Their text is run on the host, so all but NVIDIA's
//! compiler and the launch is covered without a GPU; the last test needs one.
#![allow(clippy::single_range_in_vec_init)] // blocks of one dim
use candle_core::{DType, Device, Tensor};
use candle_dist_kernels::parts::{DRAW_SOURCE, DrawLaunch};
use candle_shard::random::{Distribution, Stream, sample};
use device_text::{DeviceText, LaunchShape, PlainNumber, TextArgument};
use proptest::prelude::*;
use std::ops::Range;

const DISTRIBUTIONS: [Distribution; 4] = [
    Distribution::Uniform { lo: -0.7, up: 2.1 },
    Distribution::Normal { mean: 0.3, stdev: 1.7 },
    Distribution::Normal { mean: 0.0, stdev: 1.0 },
    Distribution::Bernoulli { p: 0.3 },
];
const DTYPES: [DType; 2] = [DType::F32, DType::F64];

/// Kernels that write a function of the floats whose bits are `from`, `from + step` and so on.
const PROBES: &str = r#"
#define PROBE(NAME, T, OF_BITS, BITS, FUNCTION)                                \
  extern "C" __global__ void NAME(wide count, wide from, wide step, T* out) {  \
    for (wide i = threadIdx.x; i < count; i += blockDim.x)                     \
      out[i] = FUNCTION(OF_BITS((BITS)(from + i * step)));                     \
  }
PROBE(cosine_f32, float, __uint_as_float, word, cosine)
PROBE(logarithm_f32, float, __uint_as_float, word, logarithm)
PROBE(cosine_f64, double, from_bits, wide, cosine)
PROBE(logarithm_f64, double, from_bits, wide, logarithm)
"#;

/// The compiled kernels.
struct Drawing(DeviceText);

impl Drawing {
    fn compiled(source: &str) -> Option<Self> {
        DeviceText::for_test(&[source, PROBES].concat()).map(Self)
    }

    /// Returns the bytes of the elements that a launch draws.
    fn draw(&self, launch: &DrawLaunch) -> Vec<u8> {
        if launch.name.ends_with("f64") {
            self.draw_as(launch, launch.parameters, f64::to_le_bytes)
        } else {
            self.draw_as(launch, launch.parameters.map(|x| x as f32), f32::to_le_bytes)
        }
    }

    fn draw_as<T: PlainNumber + Default, const N: usize>(
        &self,
        launch: &DrawLaunch,
        [a, b]: [T; 2],
        to_bytes: fn(T) -> [u8; N],
    ) -> Vec<u8> {
        let mut out = vec![T::default(); launch.count as usize];
        let [seed, id, first] = launch.stream;
        self.run(
            launch.name,
            launch.blocks,
            &mut [
                TextArgument::value(launch.count),
                TextArgument::value(launch.base),
                TextArgument::value(launch.dims.len() as u64 / 2),
                TextArgument::read(&launch.dims),
                TextArgument::written(&mut out),
                TextArgument::value(seed),
                TextArgument::value(id),
                TextArgument::value(first),
                TextArgument::value(a),
                TextArgument::value(b),
            ],
        );
        out.into_iter().flat_map(to_bytes).collect()
    }

    /// Returns a function of floats, see [`PROBES`].
    fn probe<T: PlainNumber + Default>(&self, name: &str, count: u64, from: u64, step: u64) -> Vec<T> {
        let mut out = vec![T::default(); count as usize];
        let numbers = [count, from, step].map(TextArgument::value);
        let mut arguments: Vec<_> = numbers.into_iter().chain([TextArgument::written(&mut out)]).collect();
        self.run(name, 1, &mut arguments);
        drop(arguments);
        out
    }

    fn run(&self, name: &str, blocks: u32, arguments: &mut [TextArgument<'_>]) {
        let block = [DrawLaunch::THREADS, 1, 1];
        let done = self.0.run(name, LaunchShape { grid: [blocks, 1, 1], block, shared: 0 }, arguments);
        done.unwrap_or_else(|fault| panic!("{fault}"));
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::F64 => flat.to_vec1::<f64>().unwrap().into_iter().flat_map(f64::to_le_bytes).collect(),
        _ => flat.to_vec1::<f32>().unwrap().into_iter().flat_map(f32::to_le_bytes).collect(),
    }
}

fn assert_drawn(
    program: &Drawing,
    stream: Stream,
    dist: Distribution,
    shape: &[usize],
    block: &[Range<usize>],
    dtype: DType,
) {
    let host = sample(stream, dist, shape, block, dtype, &Device::Cpu).unwrap();
    let launch = DrawLaunch::new(stream, dist, shape, block, dtype).unwrap();
    let drawn = program.draw(&launch);
    let size = dtype.size_in_bytes();
    let (host, wrong) = (bytes(&host), |(a, b): (&[u8], &[u8])| a != b);
    assert_eq!(host.len(), drawn.len());
    let first = host.chunks(size).zip(drawn.chunks(size)).position(wrong);
    assert_eq!(first, None, "{dist:?} of {shape:?}, {block:?}, {dtype:?}, {stream:?}");
}

#[test]
fn the_kernels_draw_the_bits_of_the_host() {
    let Some(program) = Drawing::compiled(DRAW_SOURCE) else { return };
    // Whole tensors, rows, columns, boxes, one element; dims of one element; several blocks of threads.
    let blocks: &[(&[usize], &[Range<usize>])] = &[
        (&[], &[]),
        (&[1], &[0..1]),
        (&[100_003], &[0..100_003]),
        (&[100_003], &[99_990..100_001]),
        (&[33, 70], &[3..33, 0..70]),
        (&[33, 70], &[0..33, 69..70]),
        (&[33, 70], &[1..32, 13..62]),
        (&[7, 1, 5, 9], &[2..7, 0..1, 1..4, 3..8]),
        (&[7, 1, 5, 9], &[2..3, 0..1, 0..5, 0..9]),
        (&[2, 3, 2, 3, 2, 3], &[0..2, 1..3, 0..1, 0..3, 1..2, 0..2]),
    ];
    let streams =
        [Stream::new(0, "a"), Stream::new(u64::MAX, "b").skip(5), Stream::new(7, "c").skip(u64::MAX - 3)];
    for (shape, block) in blocks {
        for (stream, dist) in streams.iter().flat_map(|&stream| DISTRIBUTIONS.map(|dist| (stream, dist))) {
            DTYPES.iter().for_each(|&dtype| assert_drawn(&program, stream, dist, shape, block, dtype));
        }
    }
}

#[test]
fn the_kernels_draw_any_block_of_any_tensor() {
    let Some(program) = Drawing::compiled(DRAW_SOURCE) else { return };
    let dims = prop::collection::vec((1..12usize, 0..12usize, 1..12usize), 0..5);
    let cases = (
        dims,
        any::<u64>(),
        any::<u64>(),
        prop::sample::select(&DISTRIBUTIONS),
        prop::sample::select(&DTYPES),
    );
    let config = ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |((dims, seed, skipped, dist, dtype) in cases)| {
        let shape: Vec<usize> = dims.iter().map(|(size, ..)| *size).collect();
        let range = |&(size, start, len): &(usize, usize, usize)| {
            let start = start.min(size - 1);
            start..(start + len).min(size)
        };
        let block: Vec<_> = dims.iter().map(range).collect();
        assert_drawn(&program, Stream::new(seed, "any").skip(skipped), dist, &shape, &block, dtype);
    });
}

/// The numbers above meet few of the floats at which cosine and logarithm change their formula.
#[test]
fn the_kernels_functions_are_those_of_the_host_wherever_they_change_their_formula() {
    let Some(program) = Drawing::compiled(DRAW_SOURCE) else { return };
    // Compares floats with the bits `from`, `from + step` and so on, up to `to`.
    let narrow = |name: &str, [from, to]: [f32; 2], step: u64, function: fn(f32) -> f32| {
        let (from, to) = (u64::from(from.to_bits()), u64::from(to.to_bits()));
        let found = program.probe::<f32>(name, (to - from) / step + 1, from, step);
        for (i, found) in (0..).zip(found) {
            let bits = from + i * step;
            let want = function(f32::from_bits(bits as u32));
            assert_eq!(found.to_bits(), want.to_bits(), "{name} of the float with the bits {bits:#x}");
        }
    };
    let wide = |name: &str, [from, to]: [f64; 2], step: u64, function: fn(f64) -> f64| {
        let (from, to) = (from.to_bits(), to.to_bits());
        let found = program.probe::<f64>(name, (to - from) / step + 1, from, step);
        for (i, found) in (0..).zip(found) {
            let bits = from + i * step;
            let want = function(f64::from_bits(bits));
            assert_eq!(found.to_bits(), want.to_bits(), "{name} of the float with the bits {bits:#x}");
        }
    };
    let near_f32 = |x: f32| [-2000i32, 2000].map(|by| f32::from_bits(x.to_bits().wrapping_add_signed(by)));
    let near_f64 = |x: f64, by: i64| [-by, by].map(|by| f64::from_bits(x.to_bits().wrapping_add_signed(by)));
    let (tau_32, tau_64) = (std::f32::consts::TAU, std::f64::consts::TAU);
    narrow("cosine_f32", [f32::MIN_POSITIVE, tau_32], 997, libm::cosf);
    wide("cosine_f64", [f64::MIN_POSITIVE, tau_64], (1 << 46) + 12345, libm::cos);
    for n in 1..8 {
        narrow("cosine_f32", near_f32(tau_32 / 8.0 * n as f32), 1, libm::cosf);
        // From the next floats to those that need no second part of pi/2.
        for step in [1, 1 << 10, 1 << 20, 1 << 30, 1 << 34] {
            wide("cosine_f64", near_f64(tau_64 / 8.0 * f64::from(n), 1000 * step), step as u64, libm::cos);
        }
    }
    for step in [1, 1 << 10, 1 << 20, 1 << 30] {
        wide("cosine_f64", [near_f64(tau_64, 1000 * step)[0], tau_64], step as u64, libm::cos);
    }
    narrow("logarithm_f32", [1.0 / (1u64 << 32) as f32, 1.0], 997, libm::logf);
    wide("logarithm_f64", [1.0 / (1u64 << 53) as f64, 1.0], (1 << 40) + 12345, libm::log);
    for k in 0..5 {
        let edge = std::f64::consts::FRAC_1_SQRT_2 / f64::from(1 << k);
        narrow("logarithm_f32", near_f32(edge as f32), 1, libm::logf);
        for step in [1, 1 << 20, 1 << 32] {
            wide("logarithm_f64", near_f64(edge, 1000 * step), step as u64, libm::log);
        }
    }
}

/// What the tests above would miss, they would miss here too.
#[test]
fn a_fused_multiply_add_in_the_kernels_would_be_found() {
    let lines = "return lo + span * even(x, T());";
    assert!(DRAW_SOURCE.contains(lines));
    let fused = DRAW_SOURCE.replace(lines, "return fma(span, even(x, T()), lo);");
    let Some(program) = Drawing::compiled(&fused) else { return };
    let (stream, dist) = (Stream::new(0, "fused"), Distribution::Uniform { lo: -0.7, up: 2.1 });
    for dtype in DTYPES {
        let launch = DrawLaunch::new(stream, dist, &[4096], &[0..4096], dtype).unwrap();
        let host = sample(stream, dist, &[4096], &[0..4096], dtype, &Device::Cpu).unwrap();
        assert_ne!(program.draw(&launch), bytes(&host), "{dtype:?}");
    }
}

#[test]
fn numbers_that_a_gpu_draws_are_those_of_the_host() {
    if test_utils::skip_unless_gpus(1) {
        return;
    }
    let gpu = Device::new_cuda(0).unwrap();
    let blocks: &[(&[usize], &[Range<usize>])] =
        &[(&[], &[]), (&[1000], &[0..1000]), (&[33, 70], &[1..32, 13..62]), (&[33, 70], &[4..4, 0..70])];
    for (shape, block) in blocks {
        for dist in DISTRIBUTIONS {
            for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
                let of = |device| {
                    sample(Stream::new(3, "gpu").skip(9), dist, shape, block, dtype, device).unwrap()
                };
                let (host, drawn) = (of(&Device::Cpu), of(&gpu));
                assert!(drawn.device().is_cuda());
                assert_eq!((drawn.dims(), drawn.dtype()), (host.dims(), dtype));
                if host.elem_count() > 0 {
                    let exact = |x: Tensor| x.to_dtype(DType::F64).unwrap();
                    assert_eq!(
                        bytes(&exact(drawn.to_device(&Device::Cpu).unwrap())),
                        bytes(&exact(host)),
                        "{dist:?}"
                    );
                }
            }
        }
    }
}
