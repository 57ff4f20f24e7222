//! Kernels with barriers and exchanges give what a device gives, and faults of kernels are found.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use device_text::{DeviceText, FaultKind, LaunchFault, LaunchShape, TextArgument};

const TEXT: &str = r#"
// Sums of each block, by halves.
extern "C" __global__ void block_sums(int count, const float* from, float* to) {
  __shared__ float all[64];
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  all[threadIdx.x] = at < count ? from[at] : 0.0f;
  for (int half = 32; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) all[threadIdx.x] += all[threadIdx.x + half];
  }
  if (threadIdx.x == 0) to[blockIdx.x] = all[0];
}
// The same without the barriers.
extern "C" __global__ void hasty_sums(int count, const float* from, float* to) {
  __shared__ float all[64];
  all[threadIdx.x] = from[threadIdx.x];
  if (threadIdx.x == 0)
    for (int i = 1; i < 64; i++) all[0] += all[i];
  if (threadIdx.x == 0) to[blockIdx.x] = all[0];
}
extern "C" __global__ void lanes(const int* from, int* to) {
  const int x = from[threadIdx.x], lane = threadIdx.x % 32;
  int* mine = to + 6 * threadIdx.x;
  mine[0] = __shfl_xor_sync(0xffffffffu, x, 3);
  mine[1] = __shfl_sync(0xffffffffu, x, 5, 8);
  mine[2] = __shfl_down_sync(0xffffffffu, x, 4);
  mine[3] = __shfl_up_sync(0xffffffffu, x, 2, 16);
  mine[4] = (int)__ballot_sync(0xffffffffu, x % 3 == 0);
  // Half of the lanes alone.
  mine[5] = -1;
  if (lane < 16) mine[5] = __shfl_xor_sync(0xffffu, x, 1);
}
// Neighbors of a warp change places through shared memory.
extern "C" __global__ void neighbors(int waits, int* to) {
  __shared__ int all[64];
  all[threadIdx.x] = threadIdx.x;
  if (waits) __syncwarp();
  to[threadIdx.x] = all[threadIdx.x ^ 1];
}
extern "C" __global__ void other_warp(int* to) {
  __shared__ int all[64];
  all[threadIdx.x] = threadIdx.x;
  __syncwarp();
  to[threadIdx.x] = all[threadIdx.x ^ 32];
}
extern "C" __global__ void half_waits(int* to) {
  if (threadIdx.x < 7) __syncthreads();
  to[threadIdx.x] = 1;
}
extern "C" __global__ void two_barriers(int* to) {
  if (threadIdx.x < 7) __syncthreads();
  else __syncthreads();
  to[threadIdx.x] = 1;
}
extern "C" __global__ void lonely_lane(int* to) {
  if (threadIdx.x != 3) to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
  __syncthreads();
}
extern "C" __global__ void unset(float* to) {
  __shared__ float all[64];
  if (threadIdx.x > 0) all[threadIdx.x] = 1.0f;
  __syncthreads();
  to[threadIdx.x] = all[threadIdx.x];
}
extern "C" __global__ void before(const int* from, int* to) { to[threadIdx.x] = from[(int)threadIdx.x - 1]; }
extern "C" __global__ void askew(const float* from, float4* to) { to[0] = *(const float4*)(from + 1); }
extern "C" __global__ void added(float* to) { atomicAdd(to, 1.0f); }
extern "C" __global__ void overwrites(const int* from) { *(int*)from = 1; }
struct Two { long long by; float x; };
extern "C" __global__ void structure(Two two, float* to) { to[two.by] = two.x; }
extern "C" __global__ void places(unsigned* to) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  to[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 100 + thread;
}
"#;

fn shape(blocks: u32, threads: u32) -> LaunchShape {
    LaunchShape { grid: [blocks, 1, 1], block: [threads, 1, 1], shared: 0 }
}

fn kind(result: Result<(), LaunchFault>) -> Option<FaultKind> {
    result.err().map(|fault| fault.kind)
}

#[test]
fn threads_wait_at_barriers_and_lanes_exchange() {
    let Some(text) = DeviceText::for_test(TEXT) else { return };
    let from: Vec<f32> = (0..100).map(|x| x as f32).collect();
    let mut to = [0f32; 2];
    let mut arguments =
        [TextArgument::value(100i32), TextArgument::read(&from), TextArgument::written(&mut to)];
    text.run("block_sums", shape(2, 64), &mut arguments).unwrap();
    drop(arguments);
    assert_eq!(to, [2016.0, 2934.0]);

    let from: Vec<i32> = (0..64).map(|x| x * x % 17).collect();
    let mut to = vec![0i32; 6 * 64];
    text.run("lanes", shape(1, 64), &mut [TextArgument::read(&from), TextArgument::written(&mut to)])
        .unwrap();
    for (i, to) in to.chunks(6).enumerate() {
        let (warp, lane) = (i / 32 * 32, i % 32);
        let of = |lane: usize| from[warp + lane];
        let ballot = (0..32).filter(|&lane| of(lane) % 3 == 0).fold(0u32, |all, lane| all | 1 << lane);
        let down = if lane + 4 < 32 { lane + 4 } else { lane };
        let up = if lane % 16 >= 2 { lane - 2 } else { lane };
        let half = if lane < 16 { of(lane ^ 1) } else { -1 };
        let want = [of(lane ^ 3), of(lane / 8 * 8 + 5), of(down), of(up), ballot as i32, half];
        assert_eq!(to, want, "thread {i}");
    }

    let mut to = vec![0u32; 2 * 3 * 2 * 4 * 2 * 3];
    let shape = LaunchShape { grid: [2, 3, 2], block: [4, 2, 3], shared: 0 };
    text.run("places", shape, &mut [TextArgument::written(&mut to)]).unwrap();
    let want: Vec<u32> = (0..12).flat_map(|block| (0..24).map(move |thread| block * 100 + thread)).collect();
    assert_eq!(to, want);
}

#[test]
fn what_no_barrier_orders_is_a_race() {
    let Some(text) = DeviceText::for_test(TEXT) else { return };
    let from = [1f32; 64];
    let mut to = [0f32; 1];
    let mut arguments =
        [TextArgument::value(64i32), TextArgument::read(&from), TextArgument::written(&mut to)];
    // Thread 0 reads first what the others have not yet written.
    let fault = kind(text.run("hasty_sums", shape(1, 64), &mut arguments));
    assert!(matches!(fault, Some(FaultKind::Race | FaultKind::Unwritten)), "{fault:?}");
    drop(arguments);
    for (waits, want) in [(1, None), (0, Some(FaultKind::Unwritten))] {
        let mut to = [0; 64];
        let mut arguments = [TextArgument::value(waits), TextArgument::written(&mut to)];
        assert_eq!(kind(text.run("neighbors", shape(1, 64), &mut arguments)), want);
        drop(arguments);
        if want.is_none() {
            assert!(to.iter().enumerate().all(|(i, &x)| x as usize == i ^ 1));
        }
    }
    let mut to = [0; 64];
    let fault = kind(text.run("other_warp", shape(1, 64), &mut [TextArgument::written(&mut to)]));
    assert!(matches!(fault, Some(FaultKind::Race | FaultKind::Unwritten)), "{fault:?}");
    // Atomic sums of all threads do not race.
    let mut to = [0f32];
    text.run("added", shape(3, 50), &mut [TextArgument::written(&mut to)]).unwrap();
    assert_eq!(to, [150.0]);
}

#[test]
fn threads_that_wait_in_vain_are_found() {
    let Some(text) = DeviceText::for_test(TEXT) else { return };
    for kernel in ["half_waits", "two_barriers", "lonely_lane"] {
        let mut to = [0; 64];
        let fault = text.run(kernel, shape(1, 64), &mut [TextArgument::written(&mut to)]).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Divergence, "{kernel}: {fault}");
    }
    // The text can be used again.
    let mut to = [0u32; 4];
    text.run("places", shape(1, 4), &mut [TextArgument::written(&mut to)]).unwrap();
    assert_eq!(to, [0, 1, 2, 3]);
}

#[test]
fn accesses_outside_of_memory_are_found() {
    let Some(text) = DeviceText::for_test(TEXT) else { return };
    let mut to = [0f32; 64];
    let fault = kind(text.run("unset", shape(1, 64), &mut [TextArgument::written(&mut to)]));
    assert_eq!(fault, Some(FaultKind::Unwritten));
    let (from, mut to) = ([1; 4], [0; 4]);
    let mut arguments = [TextArgument::read(&from), TextArgument::written(&mut to)];
    let fault = text.run("before", shape(1, 4), &mut arguments).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Memory);
    let start = "before: thread (0, 0, 0) of block (0, 0, 0) reads 4 bytes";
    assert!(fault.text.starts_with(start) && fault.text.contains("outside of all memory"), "{fault}");
    drop(arguments);
    let (from, mut to) = ([1f32; 8], [0f32; 4]);
    let fault = kind(text.run(
        "askew",
        shape(1, 1),
        &mut [TextArgument::read(&from), TextArgument::written(&mut to)],
    ));
    assert_eq!(fault, Some(FaultKind::Memory));
    let from = [1; 4];
    let fault = kind(text.run("overwrites", shape(1, 1), &mut [TextArgument::read(&from)]));
    assert_eq!(fault, Some(FaultKind::Parameters));
}

#[test]
fn parameters_are_checked() {
    let Some(text) = DeviceText::for_test(TEXT) else { return };
    let mut to = [0f32; 3];
    let two: Vec<u8> = [&2i64.to_ne_bytes()[..], &5f32.to_ne_bytes(), &[0; 4]].concat();
    let mut arguments = [TextArgument::of_bytes(two), TextArgument::written(&mut to)];
    text.run("structure", shape(1, 1), &mut arguments).unwrap();
    assert_eq!(kind(text.run("structure", shape(1, 1), &mut arguments[1..])), Some(FaultKind::Parameters));
    drop(arguments);
    assert_eq!(to, [0.0, 0.0, 5.0]);
    let mut to = [0; 4];
    let fault = kind(text.run(
        "before",
        shape(1, 4),
        &mut [TextArgument::written(&mut to), TextArgument::value(1u64)],
    ));
    assert_eq!(fault, Some(FaultKind::Parameters));
    assert_eq!(kind(text.run("missing", shape(1, 1), &mut [])), Some(FaultKind::Parameters));
    assert!(DeviceText::compile("extern \"C\" __global__ void wrong() { nothing; }").is_err());
    assert!(DeviceText::compile("int no_kernel;").is_err());
}
