//! Tensors laid out over a mesh of devices, and the layers that run on them.

pub mod kernels;
