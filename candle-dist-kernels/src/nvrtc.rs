//! Kernels of this crate on CUDA devices. NVRTC compiles them when the first one is used.
use crate::device_text::SharedLimit;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr,
    LaunchArgs, LaunchConfig, PushKernelArg, sys as driver,
};
use candle_core::cuda_backend::cudarc::nvrtc::{Ptx, result as nvrtc, sys};
use candle_core::{CudaDevice, Result, bail};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How operations on floats are compiled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rounding {
    /// Each operation is rounded by itself, as on the host.
    Single,
    /// A product and a sum may become one operation with one rounding.
    Fused,
}

/// Kernels that are compiled together, for all devices.
pub(crate) struct Kernels {
    name: &'static str,
    /// Lines that stand before the text.
    defines: &'static str,
    source: &'static str,
    rounding: Rounding,
    /// What they are compiled to, by the generation of the GPU.
    images: Mutex<BTreeMap<(i32, i32), KernelImages>>,
    /// Where they are loaded, by the GPU: they stay, and so does its context.
    modules: Mutex<BTreeMap<usize, Arc<CudaModule>>>,
    functions: Mutex<BTreeMap<(usize, String), KernelFunction>>,
}

/// A text compiled: to machine code, unless NVRTC does not know the GPU, and to PTX if that was needed.
type KernelImages = [Option<Arc<[u8]>>; 2];

/// A function on one GPU.
#[derive(Clone)]
struct KernelFunction {
    function: CudaFunction,
    /// The sizes of its parameters.
    parameters: Arc<[usize]>,
    shared: Arc<SharedLimit>,
}

impl Kernels {
    /// Names the text of some kernels.
    pub(crate) const fn new(name: &'static str, source: &'static str, rounding: Rounding) -> Self {
        Self {
            name,
            defines: "",
            source,
            rounding,
            images: Mutex::new(BTreeMap::new()),
            modules: Mutex::new(BTreeMap::new()),
            functions: Mutex::new(BTreeMap::new()),
        }
    }

    /// The same text with other lines before it.
    pub(crate) const fn with(mut self, defines: &'static str) -> Self {
        self.defines = defines;
        self
    }

    /// Returns a kernel on the stream of a device.
    ///
    /// # Errors
    /// If NVRTC refuses the text, the driver the kernels, or there is no such kernel.
    pub(crate) fn get(&self, device: &CudaDevice, kernel: &str) -> Result<DeviceKernel> {
        let stream = device.cuda_stream();
        let key = (stream.context().ordinal(), kernel.to_string());
        let known = locked(&self.functions).get(&key).cloned();
        let function = match known {
            Some(known) => known,
            None => {
                let function = self.module(stream.context())?.load_function(kernel).w()?;
                let parameters = parameters(&function)?.into();
                let made = KernelFunction { function, parameters, shared: Arc::default() };
                locked(&self.functions).entry(key).or_insert(made).clone()
            }
        };
        Ok(DeviceKernel { function, stream })
    }

    /// Returns the kernels on the GPU of a context.
    ///
    /// No lock is held while they are loaded: the driver may wait for what the GPU computes, and that for another thread.
    fn module(&self, context: &Arc<CudaContext>) -> Result<Arc<CudaModule>> {
        let gpu = context.ordinal();
        if let Some(module) = locked(&self.modules).get(&gpu) {
            return Ok(module.clone());
        }
        let module = self.load(context)?;
        Ok(locked(&self.modules).entry(gpu).or_insert(module).clone())
    }

    /// Machine code needs no compiler in the driver, which may be older than NVRTC. NVRTC may be older than the GPU: then the driver
    /// compiles what NVRTC writes for any.
    fn load(&self, context: &Arc<CudaContext>) -> Result<Arc<CudaModule>> {
        let generation = context.compute_capability().w()?;
        if let Some(machine_code) = self.image(generation, true)?
            && let Ok(module) = context.load_module(Ptx::from_binary(machine_code.to_vec()))
        {
            return Ok(module);
        }
        let Some(Ok(text)) = self.image(generation, false)?.map(|text| String::from_utf8(text.to_vec()))
        else {
            bail!("NVRTC gives no text of {}", self.name)
        };
        context.load_module(Ptx::from_src(text.trim_end_matches('\0'))).w()
    }

    /// Returns the machine code for a generation of GPUs, or else the PTX. `None` is machine code for a GPU that NVRTC does not know.
    fn image(&self, (major, minor): (i32, i32), is_machine_code: bool) -> Result<Option<Arc<[u8]>>> {
        let mut images = locked(&self.images);
        let images = images.entry((major, minor)).or_default();
        let image = &mut images[usize::from(!is_machine_code)];
        if image.is_none() {
            // Texts use what generation 8.0 has, where the GPU has it.
            let of_any =
                if major >= 8 { "--gpu-architecture=compute_80" } else { "--gpu-architecture=compute_75" };
            let of_gpu = format!("--gpu-architecture=sm_{major}{minor}");
            let architecture = if is_machine_code { of_gpu.as_str() } else { of_any };
            *image = self.compiled(architecture, is_machine_code)?.map(Arc::from);
        }
        Ok(image.clone())
    }

    /// Compiles the text for an architecture: to machine code, or else to PTX. `None` is an architecture that NVRTC does not know.
    fn compiled(&self, architecture: &str, is_machine_code: bool) -> Result<Option<Vec<u8>>> {
        let mut options = vec!["--ftz=false", "--prec-sqrt=true", "--prec-div=true"];
        options.push(if self.rounding == Rounding::Single { "--fmad=false" } else { "--fmad=true" });
        options.push(architecture);
        let Ok(source) = CString::new([self.defines, self.source].concat()) else {
            bail!("the text of {} has a zero", self.name)
        };
        let program = match nvrtc::create_program(&source, None) {
            Ok(program) => NvrtcProgram(program),
            Err(error) => bail!("NVRTC cannot read {}: {error:?}", self.name),
        };
        // SAFETY: the program exists until it is dropped, and the options during the call.
        match unsafe { nvrtc::compile_program(program.0, &options) } {
            Ok(()) => {}
            Err(nvrtc::NvrtcError(sys::nvrtcResult::NVRTC_ERROR_INVALID_OPTION)) if is_machine_code => {
                return Ok(None);
            }
            Err(error) => bail!("NVRTC cannot compile {}: {error:?}: {}", self.name, program.log()),
        }
        match program.image(is_machine_code) {
            Ok(image) => Ok(Some(image)),
            Err(error) => bail!("NVRTC gives nothing for {}: {error:?}", self.name),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A program of NVRTC.
struct NvrtcProgram(sys::nvrtcProgram);

impl NvrtcProgram {
    /// What the compiler says.
    fn log(&self) -> String {
        // SAFETY: the program exists.
        let Ok(log) = (unsafe { nvrtc::get_program_log(self.0) }) else { return String::new() };
        let bytes: Vec<u8> = log.iter().map(|&c: &c_char| c as u8).collect();
        CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The machine code, or else the PTX.
    fn image(&self, is_machine_code: bool) -> std::result::Result<Vec<u8>, nvrtc::NvrtcError> {
        let mut size = 0;
        let mut image;
        // SAFETY: the program exists and is compiled. The second call writes as many bytes as the first one says.
        unsafe {
            if is_machine_code {
                sys::nvrtcGetCUBINSize(self.0, &raw mut size).result()?;
                image = vec![0u8; size];
                sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()).result()?;
            } else {
                sys::nvrtcGetPTXSize(self.0, &raw mut size).result()?;
                image = vec![0u8; size];
                sys::nvrtcGetPTX(self.0, image.as_mut_ptr().cast()).result()?;
            }
        }
        Ok(image)
    }
}

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: the program exists, and nothing uses it afterwards. A program that cannot be destroyed only takes memory.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

/// Returns the sizes of the parameters of a kernel.
fn parameters(function: &CudaFunction) -> Result<Vec<usize>> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded. A number behind the last parameter is an error of the call.
        let status = unsafe {
            driver::cuFuncGetParamInfo(function.cu_function(), sizes.len(), &raw mut offset, &raw mut size)
        };
        match status {
            driver::CUresult::CUDA_SUCCESS => sizes.push(size),
            driver::CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(sizes),
            status => return status.result().map(|()| sizes).w(),
        }
    }
}

/// A kernel on a GPU, and the stream that its launches go to.
pub(crate) struct DeviceKernel {
    function: KernelFunction,
    stream: Arc<CudaStream>,
}

impl DeviceKernel {
    /// Begins a launch.
    pub(crate) fn call(&self) -> KernelCall<'_> {
        let arguments = self.stream.launch_builder(&self.function.function);
        KernelCall { function: &self.function, arguments, sizes: Vec::new() }
    }
}

/// A launch whose arguments are collected.
pub(crate) struct KernelCall<'a> {
    function: &'a KernelFunction,
    arguments: LaunchArgs<'a>,
    sizes: Vec<usize>,
}

impl<'a> KernelCall<'a> {
    /// Adds a number or a structure.
    pub(crate) fn value<T: DeviceRepr>(&mut self, value: &'a T) -> &mut Self {
        self.arguments.arg(value);
        self.sizes.push(size_of::<T>());
        self
    }

    /// Adds memory that the kernel reads.
    pub(crate) fn read<T>(&mut self, view: &'a CudaView<'_, T>) -> &mut Self {
        self.arguments.arg(view);
        self.sizes.push(size_of::<driver::CUdeviceptr>());
        self
    }

    /// Adds memory that the kernel writes.
    pub(crate) fn write<T>(&mut self, slice: &'a mut CudaSlice<T>) -> &mut Self {
        self.arguments.arg(slice);
        self.sizes.push(size_of::<driver::CUdeviceptr>());
        self
    }

    /// Adds a part of memory that the kernel writes.
    pub(crate) fn write_part<T>(&mut self, view: &'a mut CudaViewMut<'_, T>) -> &mut Self {
        self.arguments.arg(view);
        self.sizes.push(size_of::<driver::CUdeviceptr>());
        self
    }

    /// Launches the kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel in type, and it stays in their memory.
    ///
    /// # Errors
    /// If the kernel has other parameters in number or size, or the driver refuses the launch.
    pub(crate) unsafe fn launch(mut self, config: LaunchConfig) -> Result<()> {
        let KernelFunction { function, parameters, shared } = self.function;
        if *self.sizes != **parameters {
            bail!("a kernel with parameters of {parameters:?} bytes is given {:?}", self.sizes);
        }
        shared.raise(config.shared_mem_bytes, |bytes| {
            let most = driver::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(most, bytes as i32).w()
        })?;
        // SAFETY: the caller's.
        unsafe { self.arguments.launch(config) }.w()?;
        Ok(())
    }
}
