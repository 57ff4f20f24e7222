//! Launches on CUDA devices.
use super::call::{FusedCall, KernelText, Scalar, wide};
use crate::nvrtc::{Kernels, Rounding};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut, DeviceRepr, LaunchConfig};
use candle_core::cuda_backend::{CudaStorage, CudaStorageSlice};
use candle_core::{CudaDevice, DType, Layout, Result, Storage, bail};
use candle_dist_base::Fresh;

/// A pointer to nothing.
const NULL: u64 = 0;

/// The kernels of a text.
pub(super) fn kernels(text: KernelText) -> &'static Kernels {
    macro_rules! each {
        ($($text:ident: $rounding:ident),*) => {
            match text {
                $(KernelText::$text => {
                    static KERNELS: Kernels =
                        Kernels::new(KernelText::$text.file(), KernelText::$text.source(), Rounding::$rounding);
                    &KERNELS
                })*
            }
        };
    }
    // Optimizers have the bits of the host.
    each!(Norms: Fused, Rope: Single, Put: Single, Functions: Fused, Softmax: Fused, CrossEntropy: Fused, AdamW: Single, Strips: Single,
        Largest: Fused, Dropout: Single)
}

/// The bytes of a tensor from its first element on.
pub(super) fn bytes<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, u8>> {
    macro_rules! view {
        ($($dtype:ident),*) => {
            match &storage.slice {
                $(CudaStorageSlice::$dtype(all) => {
                    let rest = all.slice(layout.start_offset()..);
                    // SAFETY: any element is bytes, and these are as many as the elements have.
                    unsafe { rest.transmute::<u8>(rest.len() * DType::$dtype.size_in_bytes()) }
                })*
                _ => bail!("a kernel does not read this dtype"),
            }
        };
    }
    let view = view!(U8, U32, I16, I32, I64, F16, BF16, F32, F64, F8E4M3);
    view.ok_or_else(|| candle_core::Error::Msg("a tensor has fewer bytes than its elements".into()))
}

/// The bytes of all elements that a kernel writes.
pub(super) fn bytes_mut(storage: &mut CudaStorage) -> Result<CudaViewMut<'_, u8>> {
    macro_rules! view {
        ($($dtype:ident),*) => {
            match &mut storage.slice {
                $(CudaStorageSlice::$dtype(all) => {
                    let len = all.len() * DType::$dtype.size_in_bytes();
                    // SAFETY: as for `bytes`, and the kernel writes elements of the dtype.
                    unsafe { all.transmute_mut::<u8>(len) }
                })*
                _ => bail!("a kernel does not write this dtype"),
            }
        };
    }
    let view = view!(U8, U32, I16, I32, I64, F16, BF16, F32, F64, F8E4M3);
    view.ok_or_else(|| candle_core::Error::Msg("a tensor has fewer bytes than its elements".into()))
}

/// A number as the kernel gets it.
enum LaunchNumber {
    Count(u64),
    F32(f32),
    F64(f64),
}

/// See [`FusedCall::run`].
pub(super) fn run(call: &FusedCall<'_>) -> Result<Vec<Fresh>> {
    let Some(first) = call.inputs.iter().flatten().next() else { bail!("{}: no inputs", call.op) };
    let device = first.device().as_cuda_device()?;
    let kernel = kernels(call.text).get(device, &call.name())?;
    let read: Vec<_> = call.inputs.iter().map(|input| input.map(|x| x.storage_and_layout())).collect();
    let mut views = Vec::with_capacity(read.len());
    for input in &read {
        views.push(match input {
            Some((storage, layout)) => match &**storage {
                Storage::Cuda(storage) => Some(bytes(storage, layout)?),
                _ => bail!("{}: an input is not on the device of the others", call.op),
            },
            None => None,
        });
    }
    let mut made = Vec::with_capacity(call.outputs.len());
    for output in call.outputs {
        made.push(match output {
            // SAFETY: the kernel writes all elements, and the stream orders it before whatever reads them.
            Some((shape, dtype)) => Some(unsafe { device.alloc_uninit(shape, *dtype)? }),
            None => None,
        });
    }
    let mut written = Vec::with_capacity(made.len());
    for storage in &mut made {
        written.push(storage.as_mut().map(bytes_mut).transpose()?);
    }
    let given = |number: &Scalar| match (number, wide(call.dtype)) {
        (Scalar::Count(count), _) => LaunchNumber::Count(*count as u64),
        (Scalar::Real(number), DType::F64) => LaunchNumber::F64(*number),
        (Scalar::Real(number), _) => LaunchNumber::F32(*number as f32),
    };
    let numbers: Vec<LaunchNumber> = call.numbers.iter().map(given).collect();
    let mut launch = kernel.call();
    for view in &views {
        match view {
            Some(view) => launch.read(view),
            None => launch.value(&NULL),
        };
    }
    for view in &mut written {
        match view {
            Some(view) => launch.write_part(view),
            None => launch.value(&NULL),
        };
    }
    for number in &numbers {
        match number {
            LaunchNumber::Count(count) => launch.value(count),
            LaunchNumber::F32(number) => launch.value(number),
            LaunchNumber::F64(number) => launch.value(number),
        };
    }
    // SAFETY: the caller gives what the kernel takes, in number and type. A test runs the text of each kernel by the same call, and
    // finds each access outside of the tensors.
    unsafe { launch.launch(config(call.grid, call.block)) }?;
    drop(written);
    let outputs = call.outputs.iter().flatten().zip(made.into_iter().flatten());
    Ok(outputs
        .map(|((shape, _), made)| Fresh { storage: Storage::Cuda(made), shape: shape.clone() })
        .collect())
}

/// Launches a kernel that reads two tensors and writes a memory, and gets counts.
///
/// # Safety
/// The kernel takes these parameters, and accesses only what the tensors and the memory have.
pub(super) unsafe fn put(
    name: &str,
    to: &mut CudaStorage,
    read: [(&CudaStorage, &Layout); 2],
    counts: &[usize],
    (grid, block): ([usize; 2], [usize; 2]),
) -> Result<()> {
    let device = to.device().clone();
    let kernel = kernels(KernelText::Put).get(&device, name)?;
    let [(x, x_l), (y, y_l)] = read;
    let (x, y, mut written) = (bytes(x, x_l)?, bytes(y, y_l)?, bytes_mut(to)?);
    let counts: Vec<u64> = counts.iter().map(|&count| count as u64).collect();
    let mut launch = kernel.call();
    launch.read(&x).read(&y).write_part(&mut written);
    counts.iter().for_each(|count| _ = launch.value(count));
    // SAFETY: the caller's.
    unsafe { launch.launch(config(grid, block)) }
}

fn config(grid: [usize; 2], block: [usize; 2]) -> LaunchConfig {
    let dims = |[x, y]: [usize; 2]| (x as u32, y as u32, 1);
    LaunchConfig { grid_dim: dims(grid), block_dim: dims(block), shared_mem_bytes: 0 }
}

/// The bytes of a structure that a kernel gets.
#[repr(C, align(8))]
struct ParameterBytes<const N: usize>([u8; N]);

// SAFETY: they are bytes, aligned as the structures of `adam_w.cu` are.
unsafe impl<const N: usize> DeviceRepr for ParameterBytes<N> {}

/// Launches a kernel that gets one structure of `N` bytes, with the places of tensors in it.
///
/// # Safety
/// As for [`launch_structures`].
pub(super) unsafe fn launch_structure<const N: usize>(
    device: &CudaDevice,
    (text, name): (KernelText, &str),
    structure: &[u8],
    blocks: usize,
    threads: usize,
) -> Result<()> {
    let Ok(bytes) = structure.try_into() else {
        bail!("{name}: a structure of {} bytes, not {N}", structure.len());
    };
    let (structure, kernel) = (ParameterBytes::<N>(bytes), kernels(text).get(device, name)?);
    let mut launch = kernel.call();
    launch.value(&structure);
    // SAFETY: the caller's.
    unsafe { launch.launch(config([blocks, 1], [threads, 1])) }
}

/// Launches a kernel that gets two structures of `N` and `M` bytes, with the places of tensors in them.
///
/// # Safety
/// These are the structures that the kernel takes, and what it accesses is alive and ordered before and after it on the stream of the
/// device.
pub(super) unsafe fn launch_structures<const N: usize, const M: usize>(
    device: &CudaDevice,
    (text, name): (KernelText, &str),
    [first, second]: [&[u8]; 2],
    blocks: usize,
    threads: usize,
) -> Result<()> {
    let (Ok(first), Ok(second)) = (first.try_into(), second.try_into()) else {
        bail!("{name}: structures of {} and {} bytes, not {N} and {M}", first.len(), second.len());
    };
    let (first, second) = (ParameterBytes::<N>(first), ParameterBytes::<M>(second));
    let kernel = kernels(text).get(device, name)?;
    let mut launch = kernel.call();
    launch.value(&first).value(&second);
    // SAFETY: the caller's.
    unsafe { launch.launch(config([blocks, 1], [threads, 1])) }
}
