//! Attention on CUDA devices by the kernels of `attend.cu` and `tensor.cu`.
use super::heads::AttentionSizes;
use super::launch::{
    AttentionLaunches, AttentionParameters, KeyBounds, PassLaunch, ProductUnits, RowStrides, SOURCE,
};
use super::node::graph_node;
use super::{KeyBlock, Scale};
use crate::nvrtc::{DeviceKernel, Kernels, Rounding};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DeviceRepr, LaunchConfig, sys};
use candle_core::cuda_backend::{CudaDType, CudaStorage, WrapErr};
use candle_core::{CudaDevice, DType, Device, Result, Storage, Tensor, bail};
use candle_dist_base::Fresh;
use half::{bf16, f16};

macro_rules! by_columns {
    ($element:literal) => {
        [by_pass!($element, "64"), by_pass!($element, "128"), by_pass!($element, "256")]
    };
}
macro_rules! by_pass {
    ($element:literal, $columns:literal) => {
        [kernels!($element, $columns, "0"), kernels!($element, $columns, "1")]
    };
}
macro_rules! kernels {
    ($element:literal, $columns:literal, $pass:literal) => {
        Kernels::new("attention", SOURCE, Rounding::Fused).with(concat!(
            $element,
            "#define COLUMNS_USED ",
            $columns,
            "\n#define PASS_USED ",
            $pass,
            "\n"
        ))
    };
}
/// The kernels by dtype (f32, f16, bf16), by the columns of their threads (64, 128, 256) and by pass: others need not be compiled.
static KERNELS: [[[Kernels; 2]; 3]; 3] = [
    by_columns!("#define ELEMENT float\n"),
    by_columns!("#define ELEMENT f16\n#define IS_SHORT\n"),
    by_columns!("#define ELEMENT bf16\n#define IS_SHORT\n"),
];

// SAFETY: numbers in the order, and with the alignment, of `Attention` in the text.
unsafe impl DeviceRepr for AttentionParameters {}

/// Attention of inputs that the kernels have.
#[derive(Clone)]
pub(super) struct FusedAttention {
    sizes: AttentionSizes,
    scale: Scale,
    seen: KeyBounds,
    log_sums: bool,
    units: ProductUnits,
    /// The bounds on the device.
    bounds: Option<Tensor>,
}

impl FusedAttention {
    /// Returns the attention over blocks of keys that are all rows. `None` if the kernels do not have it, the device has too little
    /// shared memory, or the inputs are on several devices.
    pub(super) fn of(
        [q, k, v]: [&Tensor; 3],
        (scale, log_sums): (Scale, bool),
        blocks: &[KeyBlock],
        sizes: AttentionSizes,
    ) -> Result<Option<Self>> {
        let Device::Cuda(device) = q.device() else { return Ok(None) };
        if [k, v].iter().any(|x| !x.device().same_device(q.device())) {
            return Ok(None);
        }
        let seen = KeyBounds::new(blocks, &sizes);
        let (generation, _) = device.cuda_stream().context().compute_capability().w()?;
        let units = if generation >= 8 { ProductUnits::Tensor } else { ProductUnits::Plain };
        let made = Self { sizes, scale, seen, log_sums, units, bounds: None };
        let Some(call) = made.call([q, k, v].map(|_| Some(RowStrides::default())), q.dtype()) else {
            return Ok(None);
        };
        let AttentionLaunches { forward, of_keys, of_queries, .. } =
            call.launches(sizes.batch, q.dtype(), units);
        let most = most_shared(device)?;
        if [forward, of_keys, of_queries].iter().any(|launch| launch.shared as usize > most) {
            return Ok(None);
        }
        let bounds = (!made.seen.bounds.is_empty())
            .then(|| Tensor::from_slice(&made.seen.bounds, made.seen.bounds.len(), q.device()))
            .transpose()?;
        Ok(Some(Self { bounds, ..made }))
    }

    fn call(&self, strides: [Option<RowStrides>; 3], dtype: DType) -> Option<AttentionParameters> {
        let [q, k, v] = strides;
        AttentionParameters::new(&self.sizes, [q?, k?, v?], self.scale, &self.seen, (dtype, self.log_sums))
    }

    /// The result, as a graph node if an input is tracked.
    pub(super) fn attend(self, inputs: [&Tensor; 3]) -> Result<Tensor> {
        let detached = inputs.map(dense_columns);
        let [q, k, v] = detached;
        let [q, k, v] = [q?, k?, v?];
        let (made, norms) = match q.dtype() {
            DType::F32 => self.forward::<f32>([&q, &k, &v], 0),
            DType::F16 => self.forward::<f16>([&q, &k, &v], 1),
            _ => self.forward::<bf16>([&q, &k, &v], 2),
        }?;
        graph_node("flash_attn", inputs, made, move |inputs, of_result| {
            let [q, k, v] = inputs.map(dense_columns);
            let inputs = [&q?, &k?, &v?];
            match inputs[0].dtype() {
                DType::F32 => self.backward::<f32>(inputs, of_result, &norms, 0),
                DType::F16 => self.backward::<f16>(inputs, of_result, &norms, 1),
                _ => self.backward::<bf16>(inputs, of_result, &norms, 2),
            }
        })
    }

    fn forward<E: CudaDType + DeviceRepr>(
        &self,
        inputs: [&Tensor; 3],
        text: usize,
    ) -> Result<(Fresh, Tensor)> {
        let AttentionSizes { batch, queries, heads, width, .. } = self.sizes;
        let (device, call) = self.begin(inputs)?;
        let launch = call.launches(batch, inputs[0].dtype(), self.units).forward;
        let kernel = kernels(text, &call)[0].get(&device, &launch.name)?;
        let rows = self.sizes.rows();
        // SAFETY: the kernel writes all of it, and the stream orders it before whatever reads it.
        let mut norms = unsafe { device.alloc::<f32>(2 * rows) }?;
        let columns = width + usize::from(self.log_sums);
        let storage = if self.log_sums {
            self.run_forward::<E, f32>(&kernel, (&device, &call, &launch), inputs, rows * columns, &mut norms)
        } else {
            self.run_forward::<E, E>(&kernel, (&device, &call, &launch), inputs, rows * columns, &mut norms)
        }?;
        let made = Fresh { storage: Storage::Cuda(storage), shape: (batch, queries, heads, columns).into() };
        let norms = Storage::Cuda(CudaStorage::wrap_cuda_slice(norms, device));
        Ok((made, Fresh { storage: norms, shape: (rows, 2).into() }.into_tensor()))
    }

    fn run_forward<E: CudaDType + DeviceRepr, O: CudaDType + DeviceRepr>(
        &self,
        kernel: &DeviceKernel,
        (device, call, launch): (&CudaDevice, &AttentionParameters, &PassLaunch),
        inputs: [&Tensor; 3],
        len: usize,
        norms: &mut CudaSlice<f32>,
    ) -> Result<CudaStorage> {
        // SAFETY: as above.
        let mut out = unsafe { device.alloc::<O>(len) }?;
        let nothing = 0u64;
        with_views::<E>(inputs, |[q, k, v]| {
            self.with_bounds(|bounds| {
                let mut run = kernel.call();
                run.value(call).read(&q).read(&k).read(&v);
                match &bounds {
                    Some(bounds) => run.read(bounds),
                    None => run.value(&nothing),
                };
                run.write(&mut out).write(norms);
                // SAFETY: these are the kernel's parameters. Strides are those of the inputs, whose bounds are of their keys.
                unsafe { run.launch(config(launch)) }
            })
        })?;
        Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
    }

    /// The gradients of the query, the key and the value, from the result and its gradient.
    fn backward<E: CudaDType + DeviceRepr>(
        &self,
        inputs: [&Tensor; 3],
        [out, grad]: [&Tensor; 2],
        norms: &Tensor,
        text: usize,
    ) -> Result<[Tensor; 3]> {
        if self.log_sums {
            self.gradients::<E, f32>(inputs, [out, grad], norms, text)
        } else {
            self.gradients::<E, E>(inputs, [out, grad], norms, text)
        }
    }

    fn gradients<E: CudaDType + DeviceRepr, O: CudaDType + DeviceRepr>(
        &self,
        inputs: [&Tensor; 3],
        [out, grad]: [&Tensor; 2],
        norms: &Tensor,
        text: usize,
    ) -> Result<[Tensor; 3]> {
        let batch = self.sizes.batch;
        let (device, call) = self.begin(inputs)?;
        let [out, grad] = [out.detach().contiguous()?, grad.detach().contiguous()?];
        let (rows, kernels) = (self.sizes.rows(), &kernels(text, &call)[1]);
        let AttentionLaunches { inner: of_inner, of_keys, of_queries, .. } =
            call.launches(batch, inputs[0].dtype(), self.units);
        // SAFETY: the kernels write all elements, and the stream orders them before whatever reads them.
        let (mut inner, mut dq, mut dk, mut dv) = unsafe {
            let [q, k, v] = inputs.map(Tensor::elem_count);
            (device.alloc::<f32>(rows)?, device.alloc::<E>(q)?, device.alloc::<E>(k)?, device.alloc::<E>(v)?)
        };
        let (nothing, count) = (0u64, rows as i64);
        with_view::<O, _>(&grad, |grad| {
            let kernel = kernels.get(&device, &of_inner.name)?;
            with_view::<O, _>(&out, |out| {
                let mut run = kernel.call();
                run.value(&call).value(&count).read(&out).read(&grad).write(&mut inner);
                // SAFETY: these are the kernel's parameters, and the rows are contiguous.
                unsafe { run.launch(config(&of_inner)) }
            })?;
            let inner = inner.as_view();
            with_views::<E>(inputs, |[q, k, v]| {
                self.with_bounds(|bounds| {
                    with_view::<f32, _>(norms, |norms| {
                        for launch in [&of_keys, &of_queries] {
                            let kernel = kernels.get(&device, &launch.name)?;
                            let mut run = kernel.call();
                            run.value(&call).read(&q).read(&k).read(&v);
                            match &bounds {
                                Some(bounds) => run.read(bounds),
                                None => run.value(&nothing),
                            };
                            run.read(&grad).read(&norms).read(&inner);
                            if std::ptr::eq(launch, &raw const of_keys) {
                                run.write(&mut dk).write(&mut dv);
                            } else {
                                run.write(&mut dq);
                            }
                            // SAFETY: as for the forward pass; the gradients have the shapes of the inputs.
                            unsafe { run.launch(config(launch)) }?;
                        }
                        Ok(())
                    })
                })
            })
        })?;
        let tensor = |slice: CudaSlice<E>, like: &Tensor| {
            let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
            Fresh { storage, shape: like.shape().clone() }.into_tensor()
        };
        Ok([tensor(dq, inputs[0]), tensor(dk, inputs[1]), tensor(dv, inputs[2])])
    }

    /// The device, and the call for inputs in their layout.
    fn begin(&self, inputs: [&Tensor; 3]) -> Result<(CudaDevice, AttentionParameters)> {
        let Some(call) = self.call(inputs.map(|x| RowStrides::of(x.layout())), inputs[0].dtype()) else {
            bail!("flash_attn: the kernels do not have inputs of {:?}", inputs[0].dtype())
        };
        Ok((inputs[0].device().as_cuda_device()?.clone(), call))
    }

    fn with_bounds<R>(&self, run: impl FnOnce(Option<CudaView<'_, u32>>) -> Result<R>) -> Result<R> {
        match &self.bounds {
            Some(bounds) => with_view(bounds, |bounds| run(Some(bounds))),
            None => run(None),
        }
    }
}

/// The most bytes of shared memory that a block may have.
pub(super) fn most_shared(device: &CudaDevice) -> Result<usize> {
    let most = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    let most = device.cuda_stream().context().attribute(most).w()?;
    Ok(usize::try_from(most).unwrap_or(0))
}

/// The kernels of both passes for a dtype and the widths of a call.
fn kernels(dtype: usize, call: &AttentionParameters) -> &'static [Kernels; 2] {
    let class = [64, 128].iter().position(|&columns| call.columns() == columns).unwrap_or(2);
    &KERNELS[dtype][class]
}

/// The tensor without its graph, with columns that follow each other.
fn dense_columns(x: &Tensor) -> Result<Tensor> {
    if RowStrides::of(x.layout()).is_some() { Ok(x.detach()) } else { x.detach().contiguous() }
}

/// Runs with the elements of a tensor from the first on.
fn with_view<T: CudaDType, R>(x: &Tensor, run: impl FnOnce(CudaView<'_, T>) -> Result<R>) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        bail!("attention: an input is not on the device of the query")
    };
    run(storage.as_cuda_slice::<T>()?.slice(layout.start_offset()..))
}

fn with_views<T: CudaDType>(
    [q, k, v]: [&Tensor; 3],
    run: impl FnOnce([CudaView<'_, T>; 3]) -> Result<()>,
) -> Result<()> {
    with_view(q, |q| with_view(k, |k| with_view(v, |v| run([q, k, v]))))
}

pub(super) fn config(launch: &PassLaunch) -> LaunchConfig {
    let [x, y, z] = launch.grid;
    LaunchConfig { grid_dim: (x, y, z), block_dim: (launch.threads, 1, 1), shared_mem_bytes: launch.shared }
}
