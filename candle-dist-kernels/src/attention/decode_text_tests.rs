//! The kernels of single queries, run from their text, against the host.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use super::decode_launch::{CacheOfText, CachesOfTexts, DTYPES, DecodeCall, DecodeRows, SOURCE};
use super::launch::PassLaunch;
use super::{Scale, decode_attn};
use candle_core::{DType, Device::Cpu, Tensor, WithDType};
use device_text::{DeviceText, LaunchShape, TextMemory};
use half::{bf16, f16};

/// Returns the bytes of a structure of numbers without gaps.
fn bytes<T: Copy>(of: &T) -> Vec<u8> {
    // SAFETY: the structures here have no gaps.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(of).cast(), size_of_val(of)) }.to_vec()
}

/// Elements at an address that device memory could have.
struct DeviceMemory(Vec<u128>);

impl DeviceMemory {
    fn of<T: WithDType>(elements: &[T]) -> Self {
        let mut all = vec![0; size_of_val(elements).div_ceil(16).max(1)];
        // SAFETY: the vector has room for the elements, which are plain numbers.
        unsafe {
            std::ptr::copy_nonoverlapping(
                elements.as_ptr().cast::<u8>(),
                all.as_mut_ptr().cast(),
                size_of_val(elements),
            );
        };
        Self(all)
    }

    fn place(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn region(&self) -> TextMemory {
        TextMemory::new(self.0.as_ptr() as usize, 16 * self.0.len())
    }

    fn elements<T: WithDType>(&self, count: usize) -> Vec<T> {
        // SAFETY: the vector has as many elements, which are plain numbers.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<T>(), count) }.to_vec()
    }
}

fn drawn(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::randn(0f32, 1.0, dims, &Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn elements<T: WithDType>(x: &Tensor) -> Vec<T> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

/// Compares texts of these lengths with keys and values of type `E` and a query of type `Q`; `O` is the type of the result.
fn check<E: WithDType, Q: WithDType, O: WithDType>(
    rows: DecodeRows,
    tokens: &[usize],
    (scale, log_sums): (Scale, bool),
    bound: f32,
) {
    let at = DTYPES.iter().position(|&dtype| dtype == E::DTYPE).unwrap();
    let element = ["float", "f16", "bf16"][at];
    let Some(kernels) = DeviceText::for_test(&format!("#define ELEMENT {element}\n{SOURCE}")) else { return };
    let DecodeRows { heads, kv_heads, dim, width } = rows;
    let query = drawn(&[1, heads, tokens.len(), dim], Q::DTYPE);
    // Caches have room behind the last token.
    let kept =
        |&tokens: &usize| [dim, width].map(|columns| drawn(&[1, kv_heads, tokens + 3, columns], E::DTYPE));
    let kept: Vec<[Tensor; 2]> = tokens.iter().map(kept).collect();
    let text =
        |(kept, &tokens): (&[Tensor; 2], &usize)| kept.each_ref().map(|x| x.narrow(2, 0, tokens).unwrap());
    let texts: Vec<[Tensor; 2]> = kept.iter().zip(tokens).map(text).collect();
    let strides = [query.stride()[2], query.stride()[1]];
    let call = DecodeCall::new(rows, tokens, strides, (scale, log_sums), (Q::DTYPE, usize::MAX)).unwrap();
    let columns = call.columns();
    let held: Vec<[DeviceMemory; 2]> =
        kept.iter().map(|pair| pair.each_ref().map(|x| DeviceMemory::of(&elements::<E>(x)))).collect();
    let mut caches = CachesOfTexts::default();
    for ((cache, held), text) in caches.0.iter_mut().zip(&held).zip(&texts) {
        let strides = text.each_ref().map(|x| [x.stride()[1] as i64, x.stride()[2] as i64]);
        *cache = CacheOfText {
            places: held.each_ref().map(DeviceMemory::place),
            strides,
            tokens: text[0].dims()[2] as i64,
        };
    }
    let count = tokens.len() * heads * columns;
    let (q, out) =
        (DeviceMemory::of(&elements::<Q>(&query)), DeviceMemory::of(&vec![O::from_f64(7.0); count]));
    let parts = DeviceMemory::of(&vec![f32::NAN; call.joined().map_or(1, |(_, floats)| floats)]);
    let run = |launch: &PassLaunch, places: [&DeviceMemory; 3], used: usize| {
        let places = places[..used].iter().map(|memory| memory.place().to_ne_bytes().to_vec());
        let parameters: Vec<Vec<u8>> = [bytes(&call), bytes(&caches)].into_iter().chain(places).collect();
        let mut memory: Vec<_> =
            held.iter().flatten().chain([&q, &out, &parts]).map(DeviceMemory::region).collect();
        let shape =
            LaunchShape { grid: launch.grid, block: [launch.threads, 1, 1], shared: launch.shared as usize };
        // SAFETY: the regions are the vectors above.
        let done = unsafe { kernels.launch(&launch.name, shape, &parameters, &mut memory) };
        done.unwrap_or_else(|fault| panic!("{fault}"));
    };
    run(&call.attention(), [&q, &out, &parts], 3);
    if let Some((joined, _)) = call.joined() {
        run(&joined, [&parts, &out, &q], 2);
    }
    let made: Vec<f32> = out.elements::<O>(count).iter().map(|x| x.to_f64() as f32).collect();
    let wide = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
    let texts: Vec<_> = texts.iter().map(|pair| pair.each_ref().map(wide)).collect();
    let want = decode_attn(&wide(&query), &texts, scale, log_sums).unwrap();
    let want = elements::<f64>(&want);
    for (at, (made, want)) in made.iter().zip(&want).enumerate() {
        let is_near = (f64::from(*made) - want).abs() <= f64::from(bound) * (1.0 + want.abs());
        assert!(
            is_near || f64::from(*made) == *want,
            "{rows:?}, {tokens:?}, {scale:?}, {at}: {made} instead of {want}"
        );
    }
}

#[test]
fn single_queries_get_what_the_host_gives() {
    let rows = |heads, kv_heads, dim, width| DecodeRows { heads, kv_heads, dim, width };
    let scale = |factor: f64, cap: Option<f64>| Scale { factor, cap };
    check::<f32, f32, f32>(rows(4, 2, 16, 16), &[5, 300, 1], (scale(0.3, None), false), 1e-5);
    check::<bf16, bf16, bf16>(rows(6, 2, 64, 40), &[257, 3], (scale(0.2, None), false), 1e-2);
    check::<bf16, f32, f32>(rows(1, 1, 33, 130), &[600], (scale(-0.2, Some(1.5)), true), 1e-5);
    check::<f16, f16, f32>(rows(18, 2, 8, 200), &[70, 300, 256], (scale(0.5, None), true), 1e-4);
    check::<f16, bf16, bf16>(rows(3, 3, 200, 3), &[64, 65], (scale(0.1, Some(20.0)), false), 1e-2);
    // The first query of a text that has no tokens yet.
    check::<f32, f32, f32>(rows(2, 1, 4, 4), &[0, 2], (scale(1.0, None), true), 1e-5);
}

#[test]
fn calls_that_a_device_does_not_hold_are_not_made() {
    let call = |rows, tokens, scale: Scale, most| {
        DecodeCall::new(rows, &[tokens], [0, 0], (scale, false), (DType::F32, most))
    };
    let rows = |heads, dim| DecodeRows { heads, kv_heads: heads, dim, width: dim };
    // Generations 7.5, 8.6 and 9.0.
    for (kibibytes, widest) in [(64, 219), (99, 256), (227, 256)] {
        let fits = |dim| call(rows(1, dim), 1, 1.0.into(), kibibytes << 10).is_some();
        assert_eq!((1..300).filter(|&dim| fits(dim)).max(), Some(widest), "{kibibytes} KiB");
    }
    // Parts of many keys and heads are counted in 64 bits.
    let large = call(rows(65_535, 1), (1 << 31) - 1, 1.0.into(), usize::MAX).unwrap();
    assert_eq!(large.joined().unwrap().1, (1 << 23) * 65_535 * 3);
    // As f32, a small cap would be none, and a large number infinite.
    for scale in [
        Scale { factor: 1.0, cap: Some(1e-60) },
        Scale { factor: 1.0, cap: Some(1e60) },
        Scale { factor: -1e60, cap: None },
    ] {
        assert!(call(rows(1, 8), 1, scale, usize::MAX).is_none(), "{scale:?}");
    }
}
