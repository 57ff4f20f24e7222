//! AdamW for many tensors in one launch.
use super::call::KernelText;
use super::emulated::{self, is_emulated};
use super::run::runs_on;
use crate::memory_of;
use crate::real::is_computed;
use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor, Var, bail};
use candle_dist_base::sum_dtype;
use std::cell::RefCell;
use std::collections::HashSet;

/// The tensors of a launch, and the elements of a block: as in `adam_w.cu`.
const TENSORS: usize = 48;
const ELEMENTS: usize = 8192;
const THREADS: usize = 256;

/// A variable, or its master, that a step updates.
pub struct AdamWUpdate<'a> {
    /// The steps of the variable, with this one.
    pub steps: u32,
    /// The variable.
    pub var: &'a Var,
    /// The 32-bit copy that is stepped instead of a 16-bit variable.
    pub master: Option<&'a Var>,
    /// The running means of the gradient and of its square.
    pub moments: [&'a Var; 2],
    /// The gradient.
    pub grad: &'a Tensor,
}

/// The options of a step.
#[derive(Clone, Copy)]
pub(crate) struct AdamWOptions {
    pub(crate) lr: f64,
    /// The decay of the two running means.
    pub(crate) betas: [f64; 2],
    pub(crate) eps: f64,
    /// The factor of weight decay.
    pub(crate) keep: f64,
}

impl AdamWOptions {
    /// The factors of the bias correction after so many steps.
    pub(crate) fn scales(self, steps: u32) -> [f64; 2] {
        self.betas.map(|beta| 1.0 / (1.0 - beta.powi(steps as i32)))
    }
}

impl<'a> AdamWUpdate<'a> {
    /// The tensors that a step changes: the variable, the copy if there is one, and the moments.
    fn changed(&self) -> impl Iterator<Item = &'a Tensor> + use<'a> {
        let Self { var, master, moments: [first, second], .. } = *self;
        [Some(var), master, Some(first), Some(second)].into_iter().flatten().map(|var| var.as_tensor())
    }
}

/// The kernel of an update, by the dtypes of its tensors; `None` if there is none.
pub(crate) fn kernel(update: &AdamWUpdate<'_>) -> Option<&'static str> {
    let AdamWUpdate { var, moments: [first, second], master, grad, .. } = update;
    let (x, wide) = (var.dtype(), sum_dtype(var.dtype()));
    let is_plain = |tensor: &Tensor| {
        tensor.is_contiguous()
            && tensor.layout().start_offset() == 0
            && tensor.elem_count() == var.elem_count()
    };
    let fits = is_computed(x)
        && runs_on(var.device())
        && update.changed().all(|tensor| is_plain(tensor) && tensor.device().same_device(var.device()))
        && grad.device().same_device(var.device())
        && first.dtype() == second.dtype()
        && [first.dtype(), grad.dtype()].iter().all(|dtype| [x, wide].contains(dtype))
        && master.is_none_or(|master| wide != x && master.dtype() == wide);
    if !fits {
        return None;
    }
    Some(match (x, first.dtype() == x, grad.dtype() == x) {
        (DType::F32, true, true) => "adam_w_f32",
        (DType::F64, true, true) => "adam_w_f64",
        (DType::F16, true, true) => "adam_w_f16",
        (DType::F16, true, false) => "adam_w_f16_wide_grads",
        (DType::F16, false, true) => "adam_w_f16_wide_states",
        (DType::F16, false, false) => "adam_w_f16_all_wide",
        (DType::BF16, true, true) => "adam_w_bf16",
        (DType::BF16, true, false) => "adam_w_bf16_wide_grads",
        (DType::BF16, false, true) => "adam_w_bf16_wide_states",
        (DType::BF16, false, false) => "adam_w_bf16_all_wide",
        _ => return None,
    })
}

/// Updates tensors that have this [`kernel`], all on one device.
pub(crate) fn step(kernel: &'static str, updates: &[&AdamWUpdate<'_>], options: AdamWOptions) -> Result<()> {
    let mut rest = updates;
    while !rest.is_empty() {
        let (count, changed) = launched(rest);
        if count == 0 {
            bail!("AdamW: a variable shares memory with its moments or its copy");
        }
        let (updates, others) = rest.split_at(count);
        rest = others;
        let mut grads = Vec::with_capacity(count);
        for update in updates {
            let grad = update.grad.detach().contiguous()?;
            // What is changed cannot be read.
            grads.push(if changed.contains(&memory_of(&grad)) { grad.copy()? } else { grad });
        }
        let changed: Vec<&Tensor> = updates.iter().flat_map(|update| update.changed()).collect();
        let launch = UpdateLaunch { kernel, updates, options };
        with_places(&changed, Vec::new(), &mut |changed| launch.run(changed, &grads))?;
    }
    Ok(())
}

/// Returns how many of the first updates one launch may have, and the memory that it changes.
///
/// Each memory is locked while it is changed. So an update that changes or reads what an earlier one changes is of the next launch.
fn launched(updates: &[&AdamWUpdate<'_>]) -> (usize, HashSet<usize>) {
    let mut changed = HashSet::new();
    for (count, update) in updates.iter().take(TENSORS).enumerate() {
        let of_update: HashSet<usize> = update.changed().map(memory_of).collect();
        let is_apart = of_update.len() == update.changed().count()
            && changed.is_disjoint(&of_update)
            && !changed.contains(&memory_of(update.grad));
        if !is_apart {
            return (count, changed);
        }
        changed.extend(of_update);
    }
    (updates.len().min(TENSORS), changed)
}

/// Where the elements of a tensor are while they may be changed.
struct ChangedPlace<'a> {
    address: u64,
    bytes: usize,
    /// Orders the use of the memory among streams.
    #[cfg(feature = "cuda")]
    _order: Option<candle_core::cuda_backend::cudarc::driver::SyncOnDrop<'a>>,
    #[cfg(not(feature = "cuda"))]
    _order: std::marker::PhantomData<&'a ()>,
}

/// Runs `f` on the places of tensors that are plain, see [`kernel`], each with its own memory.
fn with_places(
    tensors: &[&Tensor],
    held: Vec<ChangedPlace<'_>>,
    f: &mut dyn FnMut(&[ChangedPlace<'_>]) -> Result<()>,
) -> Result<()> {
    let [first, rest @ ..] = tensors else { return f(&held) };
    let mut held = Some(held);
    let mut change = |place: ChangedPlace<'_>| {
        let mut held: Vec<ChangedPlace<'_>> = held.take().unwrap_or_default(); // no longer than the place
        held.push(place);
        with_places(rest, held, f)
    };
    first.inplace_op1(&PlaceChange(RefCell::new(&mut change)))
}

type ChangePlace<'f> = dyn FnMut(ChangedPlace<'_>) -> Result<()> + 'f;

struct PlaceChange<'a, 'f>(RefCell<&'a mut ChangePlace<'f>>);

impl InplaceOp1 for PlaceChange<'_, '_> {
    fn name(&self) -> &'static str {
        "AdamW"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let (place, bytes) = emulated::bytes_mut(storage)?;
        let address = place.expose_provenance() as u64;
        (self.0.borrow_mut())(ChangedPlace { address, bytes, _order: Default::default() })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;
        let stream = storage.device.cuda_stream();
        let mut view = super::cuda::bytes_mut(storage)?;
        let bytes = view.len();
        let (address, order) = view.device_ptr_mut(&stream);
        (self.0.borrow_mut())(ChangedPlace { address, bytes, _order: Some(order) })
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
        bail!("AdamW: this build has no kernels for CUDA devices")
    }
}

/// The updates of a launch.
struct UpdateLaunch<'a> {
    kernel: &'static str,
    updates: &'a [&'a AdamWUpdate<'a>],
    options: AdamWOptions,
}

impl UpdateLaunch<'_> {
    /// Launches the kernel. `changed` has the variable, the copy if there is one, and the moments of each update.
    fn run(&self, changed: &[ChangedPlace<'_>], grads: &[Tensor]) -> Result<()> {
        let read: Vec<_> = grads.iter().map(Tensor::storage_and_layout).collect();
        if is_emulated() {
            let mut memory: Vec<(*mut u8, usize)> = changed
                .iter()
                .map(|place| (std::ptr::with_exposed_provenance_mut(place.address as usize), place.bytes))
                .collect();
            let mut places = Vec::new();
            for (storage, layout) in &read {
                let Storage::Cpu(storage) = &**storage else { bail!("AdamW: a gradient is not on the host") };
                let (place, bytes) = emulated::bytes(storage, layout)?;
                places.push(place.expose_provenance() as u64);
                memory.push((place.cast_mut(), bytes));
            }
            let (structures, blocks) = self.structures(changed, &places)?;
            let name = self.kernel.to_string();
            return emulated::run_structures(
                (KernelText::AdamW, name),
                structures.to_vec(),
                memory,
                blocks,
                THREADS,
            );
        }
        #[cfg(feature = "cuda")]
        return self.run_on_device(changed, &read);
        #[cfg(not(feature = "cuda"))]
        bail!("AdamW: this build has no kernels for CUDA devices")
    }

    #[cfg(feature = "cuda")]
    fn run_on_device(
        &self,
        changed: &[ChangedPlace<'_>],
        read: &[(candle_core::StorageRef<'_>, &Layout)],
    ) -> Result<()> {
        use super::cuda::launch_structures;
        use candle_core::cuda_backend::cudarc::driver::DevicePtr;
        let device = self.updates[0].var.device().as_cuda_device()?;
        let stream = device.cuda_stream();
        let mut views = Vec::with_capacity(read.len());
        for (storage, layout) in read {
            let Storage::Cuda(storage) = &**storage else { bail!("AdamW: a gradient is not on the device") };
            views.push(super::cuda::bytes(storage, layout)?);
        }
        // The events of the memory are waited for here, and recorded behind the launch when these are dropped.
        let (places, _orders): (Vec<u64>, Vec<_>) = views.iter().map(|view| view.device_ptr(&stream)).unzip();
        let ([tensors, rule], blocks) = self.structures(changed, &places)?;
        let (kernel, structures) = ((KernelText::AdamW, self.kernel), [&tensors[..], &rule]);
        // SAFETY: `structures` writes those of the text. All tensors are held, and their memory is ordered by their events.
        unsafe {
            match self.updates[0].var.dtype() {
                DType::F64 => {
                    launch_structures::<{ size(8) }, 64>(device, kernel, structures, blocks, THREADS)
                }
                _ => launch_structures::<{ size(4) }, 32>(device, kernel, structures, blocks, THREADS),
            }
        }
    }

    /// The structures `Tensors` and `Rule` of the text, and the number of blocks.
    fn structures(&self, changed: &[ChangedPlace<'_>], grads: &[u64]) -> Result<([Vec<u8>; 2], usize)> {
        let is_f64 = self.updates[0].var.dtype() == DType::F64;
        let real = |number: f64| match is_f64 {
            true => number.to_le_bytes().to_vec(),
            false => (number as f32).to_le_bytes().to_vec(),
        };
        let mut places = [[0u64; TENSORS]; 6];
        let mut scales = [[0.0; TENSORS]; 2];
        let mut starts = [0u32; TENSORS];
        let (mut changed, mut blocks) = (changed.iter(), 0);
        for (at, update) in self.updates.iter().enumerate() {
            let mut next = || changed.next().map_or(0, |place| place.address);
            places[0][at] = next();
            places[1][at] = if update.master.is_some() { next() } else { 0 };
            (places[2][at], places[3][at]) = (next(), next());
            places[4][at] = grads[at];
            let count = update.var.elem_count();
            places[5][at] = count as u64;
            let [first, second] = self.options.scales(update.steps);
            (scales[0][at], scales[1][at]) = (first, second);
            starts[at] = blocks as u32;
            blocks += count.div_ceil(ELEMENTS);
        }
        if blocks > i32::MAX as usize {
            bail!("AdamW: {blocks} blocks are more than a launch has");
        }
        let mut tensors: Vec<u8> =
            places.as_flattened().iter().flat_map(|place| place.to_le_bytes()).collect();
        tensors.extend(scales.as_flattened().iter().flat_map(|&scale| real(scale)));
        tensors.extend(starts.iter().flat_map(|start| start.to_le_bytes()));
        tensors.extend((self.updates.len() as u32).to_le_bytes());
        tensors.extend([0; 4]); // a structure with pointers ends at a multiple of 8
        let AdamWOptions { lr, betas: [first, second], eps, keep } = self.options;
        let rule = [first, 1.0 - first, second, 1.0 - second, lr, eps, keep, 0.0];
        Ok(([tensors, rule.into_iter().flat_map(real).collect()], blocks))
    }
}

/// The bytes of `Tensors` for a compute type of so many.
#[cfg(feature = "cuda")]
const fn size(real: usize) -> usize {
    TENSORS * (6 * 8 + 2 * real + 4) + 8
}
