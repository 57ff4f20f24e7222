//! Products with quantized weights.
//!
//! On the CPU a weight is packed to tiles of sixteen rows ([`format`]), so that a vector instruction works on sixteen
//! rows and no sum crosses the lanes of a vector. Inputs are rounded to eight bits ([`inputs`]). One kernel
//! ([`kernel`]) runs on several kinds of lanes ([`lanes`]), which the processor decides at run time and which compute
//! the same bits. A result depends on its rows of the weight and of the input alone, so weights may be cut anywhere
//! between rows. On other devices, candle multiplies.
//!
#![doc = include_str!("README.md")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(all(target_arch = "x86_64", feature = "avx512"))]
mod avx512;
mod blocks;
mod floats;
mod format;
mod inputs;
mod kernel;
mod lanes;
mod matrix;
mod portable;
mod product;
mod scaled;
#[cfg(test)]
mod tests;
mod tiles;

pub use matrix::QuantizedMatrix;
pub use product::{dequantized_linear, quantized_linear};
pub use scaled::{ScaleFormat, ScaledFormat};
