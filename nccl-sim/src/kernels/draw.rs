//! The kernels of `candle-dist-kernels/src/random/draw.cu`. A test of candle-shard runs the text of the real ones.
use super::{Kernel, number};
use crate::engine::Exec;
use crate::number::{Type, bytes, elements};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use std::f32::consts::TAU as TAU_32;
use std::f64::consts::TAU as TAU_64;

pub(super) fn draw(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let [count, base, rank, dims, out, seed, stream, first] = *v.first_chunk::<8>()?;
    let dims = elements::<u64>(&exec.read(dims, 16 * rank as usize)?);
    let (sizes, strides) = dims.split_at(rank as usize);
    let normal = kernel.op == "draw_normal";
    let words = u128::from(1 + u8::from(normal)) * (kernel.ty.size() / 4) as u128;
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut generator = ChaCha8Rng::from_seed(key);
    generator.set_stream(stream);
    let mut at = |mut index: u64| {
        let mut element = base;
        for (size, stride) in sizes.iter().zip(strides).rev() {
            element += index % size * stride;
            index /= size;
        }
        generator.set_word_pos((u128::from(first) + u128::from(element)) * words);
        if kernel.ty == Type::F32 {
            let (a, b) = (number::<f32>(v[8]), number::<f32>(v[9]));
            f64::from(narrow(kernel, &mut generator, a, b))
        } else {
            wide(kernel, &mut generator, number(v[8]), number(v[9]))
        }
    };
    let drawn: Vec<f64> = (0..count).map(&mut at).collect();
    let drawn = match kernel.ty {
        Type::F32 => bytes(drawn.into_iter().map(|x| x as f32)),
        _ => bytes(drawn.into_iter()),
    };
    exec.write(out, &drawn);
    Some(())
}

fn narrow(kernel: &Kernel, words: &mut ChaCha8Rng, a: f32, b: f32) -> f32 {
    let even = |words: &mut ChaCha8Rng| (words.next_u32() >> 8) as f32 / (1u32 << 24) as f32;
    match kernel.op.as_str() {
        "draw_uniform" => a + b * even(words),
        "draw_normal" => {
            let radius = (f64::from(words.next_u32()) + 1.0) / (1u64 << 32) as f64;
            a + b * ((-2.0 * libm::logf(radius as f32)).sqrt() * libm::cosf(TAU_32 * even(words)))
        }
        _ => f32::from(u8::from(even(words) < a)),
    }
}

fn wide(kernel: &Kernel, words: &mut ChaCha8Rng, a: f64, b: f64) -> f64 {
    let even = |words: &mut ChaCha8Rng| (words.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    match kernel.op.as_str() {
        "draw_uniform" => a + b * even(words),
        "draw_normal" => {
            let radius = 1.0 - even(words);
            a + b * ((-2.0 * libm::log(radius)).sqrt() * libm::cos(TAU_64 * even(words)))
        }
        _ => f64::from(u8::from(even(words) < a)),
    }
}
