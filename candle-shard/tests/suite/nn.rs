//! The tests of layers under plans, fully sharded units, gradients, optimizers and quantized models.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
#[allow(dead_code, unused_imports)] // each binary uses some of it
mod common;
mod fsdp;
mod fused_qkv;
mod gguf;
mod gradient_rule;
mod kv_cache;
mod latent;
mod launches;
mod layers;
mod lora;
mod moe;
mod optimizer;
mod parallelize;
mod plans;
mod quantized;
mod schemes;
mod styles;
mod text_attention;

test_utils::settle_threads!();
