//! Attention of single queries on CUDA devices by the kernels of `decode.cu`.
use super::Scale;
use super::cuda::{config, most_shared};
use super::decode_launch::{CacheOfText, CachesOfTexts, DTYPES, DecodeCall, DecodeRows, SOURCE, TEXTS};
use crate::nvrtc::{Kernels, Rounding};
use candle_core::cuda_backend::cudarc::driver::{CudaView, DevicePtr, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::{CudaDevice, DType, Device, Layout, Result, Storage, Tensor, bail};
use candle_dist_base::Fresh;
use half::{bf16, f16};

static KERNELS: [Kernels; 3] = [
    Kernels::new("attention/decode.cu", SOURCE, Rounding::Fused).with("#define ELEMENT float\n"),
    Kernels::new("attention/decode.cu", SOURCE, Rounding::Fused).with("#define ELEMENT f16\n"),
    Kernels::new("attention/decode.cu", SOURCE, Rounding::Fused).with("#define ELEMENT bf16\n"),
];

// SAFETY: numbers in the order, and with the alignment, of `Decode` in the text.
unsafe impl DeviceRepr for DecodeCall {}
// SAFETY: as above, of `Caches`.
unsafe impl DeviceRepr for CachesOfTexts {}

/// Evaluates an expression with the alias `$t` for a float of at most 32 bits.
macro_rules! with_float {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F16 => {
                type $t = f16;
                $body
            }
            DType::BF16 => {
                type $t = bf16;
                $body
            }
            _ => {
                type $t = f32;
                $body
            }
        }
    };
}

/// Returns the attention of the query `[1, heads, texts, dim]`, each text over its own keys and values: `[1, texts, heads, width]`. `None`
/// if the kernels do not have it, the device has too little shared memory, or the tensors are on several devices.
pub(super) fn decode(
    query: &Tensor,
    texts: &[[Tensor; 2]],
    rows: DecodeRows,
    (scale, log_sums): (Scale, bool),
) -> Result<Option<Tensor>> {
    let Device::Cuda(device) = query.device() else { return Ok(None) };
    let Some(text) = DTYPES.iter().position(|&known| known == texts[0][0].dtype()) else { return Ok(None) };
    if !texts.iter().flatten().all(|x| x.device().same_device(query.device())) {
        return Ok(None);
    }
    let most = most_shared(device)?;
    let query = query.detach();
    let &[_, of_head, of_text, column] = query.layout().stride() else {
        bail!("decode_attn: expected four dims")
    };
    let mut parts = Vec::new();
    for (nth, some) in texts.chunks(TEXTS).enumerate() {
        let tokens: Vec<usize> = some.iter().map(|[k, _]| k.dims()[2]).collect();
        let call =
            DecodeCall::new(rows, &tokens, [of_text, of_head], (scale, log_sums), (query.dtype(), most));
        let Some(call) = call.filter(|_| column == 1 || rows.dim == 1) else { return Ok(None) };
        let query = query.narrow(2, nth * TEXTS, some.len())?;
        let of_query = if log_sums { DType::F32 } else { query.dtype() };
        let made = with_float!(texts[0][0].dtype(), E => with_float!(query.dtype(), Q => with_float!(of_query, O => {
            of_texts::<E, Q, O>(&call, &query, some, (device, text))
        })))?;
        let shape = (1, some.len(), rows.heads, call.columns());
        parts.push(Fresh { storage: Storage::Cuda(made), shape: shape.into() }.into_tensor());
    }
    match &parts[..] {
        [one] => Ok(Some(one.clone())),
        several => Tensor::cat(several, 1).map(Some),
    }
}

/// Computes up to [`TEXTS`] texts with keys and values of type `E` for a query of type `Q`.
fn of_texts<E: CudaDType, Q: CudaDType, O: CudaDType + DeviceRepr>(
    call: &DecodeCall,
    query: &Tensor,
    texts: &[[Tensor; 2]],
    (device, text): (&CudaDevice, usize),
) -> Result<CudaStorage> {
    let (attention, joined) = (call.attention(), call.joined());
    // SAFETY: the kernels write what is read of both, and the stream orders them before whatever reads the result.
    let (mut out, mut parts) = unsafe {
        let floats = joined.as_ref().map_or(1, |(_, floats)| *floats);
        (device.alloc::<O>(texts.len() * query.dim(1)? * call.columns())?, device.alloc::<f32>(floats)?)
    };
    let stream = device.cuda_stream();
    let held: Vec<_> = texts.iter().flatten().map(Tensor::storage_and_layout).collect();
    let views =
        held.iter().map(|(storage, layout)| elements::<E>(storage, layout)).collect::<Result<Vec<_>>>()?;
    // The stream reads them until these are dropped.
    let places: Vec<_> = views.iter().map(|view| view.device_ptr(&stream)).collect();
    let mut caches = CachesOfTexts::default();
    for ((cache, [k, v]), places) in caches.0.iter_mut().zip(texts).zip(places.chunks(2)) {
        let strides = [k, v].map(|x| [x.stride()[1] as i64, x.stride()[2] as i64]);
        *cache = CacheOfText { places: [places[0].0, places[1].0], strides, tokens: k.dims()[2] as i64 };
    }
    let (storage, layout) = query.storage_and_layout();
    let query = elements::<Q>(&storage, layout)?;
    let kernel = KERNELS[text].get(device, &attention.name)?;
    let mut launch = kernel.call();
    launch.value(call).value(&caches).read(&query).write(&mut out).write(&mut parts);
    // SAFETY: these are the kernel's parameters. Places and strides are those of the tensors, which the stream reads.
    unsafe { launch.launch(config(&attention)) }?;
    if let Some((joined, _)) = &joined {
        let (kernel, parts) = (KERNELS[text].get(device, &joined.name)?, parts.as_view());
        let mut launch = kernel.call();
        launch.value(call).value(&caches).read(&parts).write(&mut out);
        // SAFETY: as above.
        unsafe { launch.launch(config(joined)) }?;
    }
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

/// The elements from the first of a tensor on.
fn elements<'a, T: CudaDType>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let Storage::Cuda(storage) = storage else {
        bail!("decode_attn: an input is not on the device of the query")
    };
    let all = storage.as_cuda_slice::<T>()?;
    Ok(if layout.shape().elem_count() == 0 { all.slice(0..0) } else { all.slice(layout.start_offset()..) })
}
