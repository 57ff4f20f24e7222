//! Launches of a kernel, and what they do to memory.
use crate::compiled::{DeviceText, RawKernel};
use std::ffi::{c_char, c_uint, c_void};
use std::fmt;
use std::mem;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::PoisonError;

/// The blocks of a launch, the threads of a block, and its bytes of dynamic shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchShape {
    /// The blocks.
    pub grid: [u32; 3],
    /// The threads of a block.
    pub block: [u32; 3],
    /// The bytes of dynamic shared memory.
    pub shared: usize,
}

/// What a launch did wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// There is no such kernel, or it has other parameters.
    Parameters,
    /// An access outside of all memory, or one that is not aligned.
    Memory,
    /// Two threads access the same bytes, one writes, and no barrier orders them.
    Race,
    /// Shared memory is read that holds nothing.
    Unwritten,
    /// Threads wait for others that do not come.
    Divergence,
}

/// A fault of a launch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaunchFault {
    /// Its kind.
    pub kind: FaultKind,
    /// The kernel, the thread, its block, and what happened.
    pub text: String,
}

impl fmt::Display for LaunchFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.text)
    }
}

impl std::error::Error for LaunchFault {}

/// A region of device memory, and the bytes of it that a launch used.
#[derive(Clone, Debug)]
pub struct TextMemory {
    /// The first byte.
    pub start: usize,
    /// The number of bytes.
    pub size: usize,
    /// The bytes that the launch read before it wrote them.
    pub read: Vec<Range<usize>>,
    /// The bytes that it wrote.
    pub written: Vec<Range<usize>>,
}

impl TextMemory {
    /// A region that nothing has used.
    pub fn new(start: usize, size: usize) -> Self {
        Self { start, size, read: Vec::new(), written: Vec::new() }
    }
}

/// `Region` of `runtime.cpp`.
#[repr(C)]
struct RawRegion {
    start: usize,
    size: usize,
    flags: *mut u8,
    cells: *mut c_void,
}

/// `Launch` of `runtime.cpp`.
#[repr(C)]
struct RawLaunch {
    call: extern "C" fn(*const c_void, *const *mut c_void),
    kernel: *const RawKernel,
    name: *const c_char,
    parameters: *const *mut c_void,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: usize,
    regions: *mut RawRegion,
    count: usize,
    fault: *mut u8,
    room: usize,
    kind: c_uint,
}

impl DeviceText {
    /// Runs a kernel. `memory` is all memory that it may use; afterwards it tells which bytes it used, also after a fault.
    ///
    /// # Safety
    /// The regions are memory that may be read and written, and that nothing else uses meanwhile.
    ///
    /// # Errors
    /// The first fault, at which the launch ends.
    pub unsafe fn launch(
        &self,
        kernel: &str,
        shape: LaunchShape,
        parameters: &[Vec<u8>],
        memory: &mut [TextMemory],
    ) -> Result<(), LaunchFault> {
        let wrong = |text: String| LaunchFault { kind: FaultKind::Parameters, text };
        let Some(found) = self.kernel(kernel) else {
            return Err(wrong(format!("there is no kernel {kernel}; there are {:?}", self.kernels())));
        };
        let sizes: Vec<usize> = parameters.iter().map(Vec::len).collect();
        let wanted: Vec<usize> = found.parameters.iter().map(|parameter| parameter.size).collect();
        if sizes != wanted {
            return Err(wrong(format!("{kernel} takes parameters of {wanted:?} bytes, not {sizes:?}")));
        }
        let threads = shape.block.iter().map(|&n| u64::from(n)).product::<u64>();
        if shape.grid.contains(&0) || !(1..=1024).contains(&threads) {
            return Err(wrong(format!("{kernel} cannot run in {shape:?}")));
        }
        memory.sort_by_key(|region| region.start);
        // Aligned as parameters of any type must be.
        let held: Vec<Vec<u128>> = parameters.iter().map(|bytes| aligned(bytes)).collect();
        let places: Vec<*mut c_void> = held.iter().map(|held| held.as_ptr().cast_mut().cast()).collect();
        let of = |region: &TextMemory| RawRegion {
            start: region.start,
            size: region.size,
            flags: std::ptr::null_mut(),
            cells: std::ptr::null_mut(),
        };
        let mut regions: Vec<RawRegion> = memory.iter().map(of).collect();
        let mut fault = vec![0; 1024];
        // SAFETY: the raw kernel is a constant of the loaded library.
        let call = unsafe { (*found.raw).call };
        let mut raw = RawLaunch {
            call,
            kernel: found.raw,
            name: found.name.as_ptr(),
            parameters: places.as_ptr(),
            grid: shape.grid,
            block: shape.block,
            shared: shape.shared,
            regions: regions.as_mut_ptr(),
            count: regions.len(),
            fault: fault.as_mut_ptr(),
            room: fault.len(),
            kind: 0,
        };
        type Run = extern "C" fn(*mut RawLaunch);
        type Forget = extern "C" fn(*mut RawRegion, usize);
        // SAFETY: `runtime.cpp` defines both with these types.
        let (run, forget): (Run, Forget) = unsafe {
            let function = |name| self.object().function(name).map_err(wrong);
            (
                mem::transmute::<NonNull<c_void>, Run>(function(c"emulated_launch")?),
                mem::transmute::<NonNull<c_void>, Forget>(function(c"emulated_forget")?),
            )
        };
        {
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            run(&raw mut raw);
        }
        let kind = match raw.kind {
            0 => None,
            1 => Some(FaultKind::Memory),
            2 => Some(FaultKind::Race),
            3 => Some(FaultKind::Unwritten),
            _ => Some(FaultKind::Divergence),
        };
        for (region, memory) in regions.iter().zip(memory) {
            if !region.flags.is_null() {
                // SAFETY: the runtime has made a flag for each byte.
                let flags = unsafe { std::slice::from_raw_parts(region.flags, region.size) };
                memory.read = ranges(flags, 1);
                memory.written = ranges(flags, 2);
            }
        }
        forget(regions.as_mut_ptr(), regions.len());
        let end = fault.iter().position(|&byte| byte == 0).unwrap_or(fault.len());
        match kind {
            None => Ok(()),
            Some(kind) => Err(LaunchFault { kind, text: String::from_utf8_lossy(&fault[..end]).into() }),
        }
    }
}

/// The bytes of a parameter at a multiple of 16.
fn aligned(bytes: &[u8]) -> Vec<u128> {
    let whole = bytes.chunks(16).map(|chunk| {
        let mut all = [0; 16];
        all[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(all)
    });
    whole.collect()
}

/// The ranges of bytes whose flags have a bit.
fn ranges(flags: &[u8], bit: u8) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = flags[at..].iter().position(|flag| flag & bit != 0).map(|by| at + by) {
        let len = flags[start..].iter().position(|flag| flag & bit == 0);
        let end = len.map_or(flags.len(), |len| start + len);
        found.push(start..end);
        at = end;
    }
    found
}
