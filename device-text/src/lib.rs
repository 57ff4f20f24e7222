//! Runs the text of CUDA kernels on the host: tests compare them with host code, and simulated GPUs launch them.
//!
//! ```
//! use device_text::{DeviceText, LaunchShape, TextArgument};
//!
//! let text = "extern \"C\" __global__ void twice(int n, const float* x, float* y) {
//!   const int i = blockIdx.x * blockDim.x + threadIdx.x;
//!   if (i < n) y[i] = 2.0f * x[i];
//! }";
//! let Some(text) = DeviceText::for_test(text) else { return };
//! let (x, mut y) = ([1f32, 2., 3.], [0f32; 3]);
//! let shape = LaunchShape { grid: [2, 1, 1], block: [2, 1, 1], shared: 0 };
//! text.run("twice", shape, &mut [TextArgument::value(3i32), TextArgument::read(&x), TextArgument::written(&mut y)]).unwrap();
//! assert_eq!(y, [2., 4., 6.]);
//! ```
//!
//! The text is compiled as C++ behind `host.h`, and linked with `runtime.cpp`. The threads of a block are fibers that switch at
//! barriers and at exchanges of a warp; blocks run one after another. A launch fails, with the thread and the block, if
//!
//! - a thread accesses bytes outside of the memory of the launch, or bytes that are not aligned,
//! - two threads access the same bytes, one of them writes, and no barrier orders them, in device or shared memory,
//! - shared memory is read that no thread of the block has written,
//! - threads wait for others that do not come, or at different barriers.
//!
//! Each operation on floats is rounded by itself: nothing is contracted to a fused multiply-add, which devices may do.
//! Texts have no `#include`. Shared memory whose size the launch says is `DYNAMIC_SHARED(float, name);`, see the prelude of
//! candle-dist-kernels.
mod arguments;
mod compiled;
mod launch;
mod object;

pub use arguments::{PlainNumber, TextArgument};
pub use compiled::{DeviceText, ParameterKind, TextParameter};
pub use launch::{FaultKind, LaunchFault, LaunchShape, TextMemory};
