//! Launches that a test runs on the host.
use super::call::{FusedCall, KernelText, Scalar};
use candle_core::{CpuStorage, DType, Layout, Result, Storage, WithDType, bail};
use candle_dist_base::Fresh;
use half::{bf16, f16};
use std::cell::RefCell;
use std::sync::Arc;

/// A parameter of a launch on the host.
#[derive(Debug)]
pub enum HostArgument {
    /// Elements that the kernel reads: their place and their bytes.
    Read(*const u8, usize),
    /// Elements that the kernel writes: their place and their bytes.
    Written(*mut u8, usize),
    /// No elements.
    Null,
    /// The bytes of a number.
    Value(Vec<u8>),
}

/// A launch on the host.
#[derive(Debug)]
pub struct HostLaunch {
    /// The text of the kernels.
    pub source: &'static str,
    /// The name of the kernel.
    pub name: String,
    /// The blocks.
    pub grid: [u32; 3],
    /// The threads of a block.
    pub block: [u32; 3],
    /// The parameters.
    pub arguments: Vec<HostArgument>,
    /// Elements to which pointers in structures lead: their places and their bytes.
    pub memory: Vec<(*mut u8, usize)>,
}

/// Runs a launch.
pub type HostRunner = Arc<dyn Fn(&HostLaunch) -> Result<()>>;

thread_local! {
    /// What runs the launches of this thread on host tensors, in tests.
    static RUNNER: RefCell<Option<HostRunner>> = const { RefCell::new(None) };
}

/// Runs `f`, whose ops on host tensors launch the kernels of CUDA devices by `runner`. Backward passes of the graph must run inside of it.
pub fn with_kernels_on_host<R>(runner: HostRunner, f: impl FnOnce() -> R) -> R {
    struct OuterRunner(Option<HostRunner>);

    impl Drop for OuterRunner {
        fn drop(&mut self) {
            let outer = self.0.take();
            RUNNER.with_borrow_mut(|runner| *runner = outer);
        }
    }
    let _outer = OuterRunner(RUNNER.replace(Some(runner)));
    f()
}

/// Returns whether a test runs the launches of this thread.
pub(super) fn is_emulated() -> bool {
    RUNNER.with_borrow(Option::is_some)
}

/// The elements of a host tensor from its first one on.
pub(super) fn bytes(storage: &CpuStorage, layout: &Layout) -> Result<(*const u8, usize)> {
    fn of<T: WithDType>(all: &[T], layout: &Layout) -> (*const u8, usize) {
        let all = &all[layout.start_offset()..];
        (all.as_ptr().cast(), size_of_val(all))
    }
    Ok(match storage {
        CpuStorage::U8(all) => of(all, layout),
        CpuStorage::U32(all) => of(all, layout),
        CpuStorage::I16(all) => of(all, layout),
        CpuStorage::I32(all) => of(all, layout),
        CpuStorage::I64(all) => of(all, layout),
        CpuStorage::F16(all) => of(all, layout),
        CpuStorage::BF16(all) => of(all, layout),
        CpuStorage::F32(all) => of(all, layout),
        CpuStorage::F64(all) => of(all, layout),
        _ => bail!("a kernel does not read this dtype"),
    })
}

/// The elements of a new host tensor.
pub(super) fn bytes_mut(storage: &mut CpuStorage) -> Result<(*mut u8, usize)> {
    fn of<T>(all: &mut [T]) -> (*mut u8, usize) {
        (all.as_mut_ptr().cast(), size_of_val(all))
    }
    Ok(match storage {
        CpuStorage::U8(all) => of(all),
        CpuStorage::U32(all) => of(all),
        CpuStorage::I16(all) => of(all),
        CpuStorage::I32(all) => of(all),
        CpuStorage::I64(all) => of(all),
        CpuStorage::F16(all) => of(all),
        CpuStorage::BF16(all) => of(all),
        CpuStorage::F32(all) => of(all),
        CpuStorage::F64(all) => of(all),
        _ => bail!("a kernel does not write this dtype"),
    })
}

/// Elements that hold NaN, or what is unlikely, until the kernel writes them: on a device they hold anything.
pub(super) fn unwritten(count: usize, dtype: DType) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::U8 => CpuStorage::U8(vec![0xa5; count]),
        DType::U32 => CpuStorage::U32(vec![0xa5a5_a5a5; count]),
        DType::I16 => CpuStorage::I16(vec![-0x5a5b; count]),
        DType::I32 => CpuStorage::I32(vec![-0x5a5a_5a5b; count]),
        DType::I64 => CpuStorage::I64(vec![-0x5a5a_5a5b; count]),
        DType::F16 => CpuStorage::F16(vec![f16::NAN; count]),
        DType::BF16 => CpuStorage::BF16(vec![bf16::NAN; count]),
        DType::F32 => CpuStorage::F32(vec![f32::NAN; count]),
        DType::F64 => CpuStorage::F64(vec![f64::NAN; count]),
        _ => bail!("a kernel does not write this dtype"),
    })
}

/// Runs a launch by the runner of this thread.
pub(super) fn run(call: &FusedCall<'_>) -> Result<Vec<Fresh>> {
    let Some(runner) = RUNNER.with_borrow(Clone::clone) else { bail!("{}: nothing runs it", call.op) };
    let read: Vec<_> = call.inputs.iter().map(|input| input.map(|x| x.storage_and_layout())).collect();
    let mut arguments = Vec::new();
    for input in &read {
        arguments.push(match input {
            Some((storage, layout)) => match &**storage {
                Storage::Cpu(storage) => {
                    let (at, len) = bytes(storage, layout)?;
                    HostArgument::Read(at, len)
                }
                _ => bail!("{}: an input is not on the host", call.op),
            },
            None => HostArgument::Null,
        });
    }
    let mut made = Vec::new();
    for output in call.outputs {
        let Some((shape, dtype)) = output else {
            arguments.push(HostArgument::Null);
            continue;
        };
        let mut storage = unwritten(shape.elem_count(), *dtype)?;
        let (at, len) = bytes_mut(&mut storage)?;
        arguments.push(HostArgument::Written(at, len));
        made.push(Fresh::host(storage, shape.clone()));
    }
    arguments.extend(call.numbers.iter().map(|number| {
        HostArgument::Value(match (number, call.dtype) {
            (Scalar::Count(count), _) => (*count as u64).to_le_bytes().to_vec(),
            (Scalar::Real(number), DType::F64) => number.to_le_bytes().to_vec(),
            (Scalar::Real(number), _) => (*number as f32).to_le_bytes().to_vec(),
        })
    }));
    let dims = |[x, y]: [usize; 2]| [x as u32, y as u32, 1];
    let launch = HostLaunch {
        source: call.text.source(),
        name: call.name(),
        grid: dims(call.grid),
        block: dims(call.block),
        arguments,
        memory: Vec::new(),
    };
    runner(&launch)?;
    Ok(made)
}

/// Runs a launch whose arguments are there.
pub(super) fn launch(launch: &HostLaunch) -> Result<()> {
    let Some(runner) = RUNNER.with_borrow(Clone::clone) else { bail!("{}: nothing runs it", launch.name) };
    runner(launch)
}

/// Runs a launch that gets structures with the places of tensors in them.
pub(super) fn run_structures(
    (text, name): (KernelText, String),
    structures: Vec<Vec<u8>>,
    memory: Vec<(*mut u8, usize)>,
    blocks: usize,
    threads: usize,
) -> Result<()> {
    let Some(runner) = RUNNER.with_borrow(Clone::clone) else { bail!("{name}: nothing runs it") };
    runner(&HostLaunch {
        source: text.source(),
        name,
        grid: [blocks as u32, 1, 1],
        block: [threads as u32, 1, 1],
        arguments: structures.into_iter().map(HostArgument::Value).collect(),
        memory,
    })
}
