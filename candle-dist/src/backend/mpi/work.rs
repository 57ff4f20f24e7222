//! A member's local work in a collective: copies and reductions within the memory of its plan.
use super::plan::{ElementRun, LocalWork, PlanBuffer};
use super::room::UninitBuffer;
use super::shapes::StridedRuns;
use crate::backend::element::with_element;
use crate::backend::reduce::reduce_slices;
use crate::backend::runs::TensorRuns;
use crate::call::ReduceOp;
use crate::{Error, Result};
use candle_core::{DType, StorageRef, Tensor};
use smallvec::SmallVec;
use std::mem::MaybeUninit;
use std::slice;

/// The buffers of a part, by their number.
const fn index(buffer: PlanBuffer) -> usize {
    match buffer {
        PlanBuffer::Input => 0,
        PlanBuffer::Result => 1,
        PlanBuffer::Scratch => 2,
    }
}

/// Returns a place's bytes.
const fn span(place: ElementRun, bytes: usize) -> (usize, usize) {
    (place.start * bytes, place.len * bytes)
}

/// Returns the bytes of a contiguous tensor on the host.
#[allow(clippy::undocumented_unsafe_blocks)] // the comments are there, but the macro hides them
pub(super) fn bytes_of<'a>(tensor: &Tensor, storage: &'a StorageRef<'_>) -> Result<&'a [u8]> {
    if tensor.elem_count() == 0 {
        return Ok(&[]);
    }
    with_element!(tensor.dtype(), T => {
        let runs = TensorRuns::<T>::new(tensor, storage, None)?;
        let elements = runs.slice(0, runs.total);
        // SAFETY: numbers have no padding, so that all of their bytes are values.
        Ok(unsafe { slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) })
    })
}

/// The addresses of a plan's buffers.
pub(super) struct PlanMemory {
    dtype: DType,
    starts: [*mut u8; PlanBuffer::COUNT],
}

// SAFETY: the addresses are used under the backend's lock, one thread at a time.
unsafe impl Send for PlanMemory {}

impl PlanMemory {
    /// Returns the memory of an input and of rooms, which the caller keeps alive.
    pub(super) fn new(
        dtype: DType,
        input: *const u8,
        result: Option<&UninitBuffer>,
        scratch: Option<&UninitBuffer>,
    ) -> Self {
        let room = |room: Option<&UninitBuffer>| room.map_or(std::ptr::null_mut(), UninitBuffer::data);
        Self { dtype, starts: [input.cast_mut(), room(result), room(scratch)] }
    }

    /// The address of a place.
    ///
    /// # Safety
    /// The place lies within its buffer.
    pub(super) unsafe fn at(&self, place: ElementRun) -> *mut u8 {
        let (start, _) = span(place, self.dtype.size_in_bytes());
        // SAFETY: the caller's promise.
        unsafe { self.starts[index(place.buffer)].add(start) }
    }

    /// The bytes of a place.
    ///
    /// # Safety
    /// The place lies within its buffer and has been written. It is not written while the bytes are used.
    pub(super) unsafe fn read<'a>(&self, place: ElementRun) -> &'a [u8] {
        let (_, len) = span(place, self.dtype.size_in_bytes());
        if len == 0 {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { slice::from_raw_parts(self.at(place), len) }
    }

    /// Writes all bytes of a place.
    ///
    /// # Safety
    /// The place lies within the result or the scratch memory and is as large as `data`. Nothing else uses it
    /// meanwhile.
    pub(super) unsafe fn write(&self, place: ElementRun, data: &[u8]) {
        // SAFETY: the caller's promise.
        unsafe { self.at(place).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    }

    /// Copies rows.
    ///
    /// # Safety
    /// As for `read` of the source and `write` of the target; both have equally many runs of the same length.
    unsafe fn copy(&self, from: StridedRuns, to: StridedRuns) {
        let run = |rows: StridedRuns, i: usize| ElementRun {
            buffer: rows.buffer,
            start: rows.start + i * rows.stride,
            len: rows.run,
        };
        for i in 0..from.count {
            // SAFETY: the caller's promise.
            unsafe { self.write(run(to, i), self.read(run(from, i))) };
        }
    }

    /// Reduces `sources`, in their order.
    ///
    /// # Safety
    /// As for `read` of the sources and `write` of `to`; all have the same number of elements.
    #[allow(clippy::undocumented_unsafe_blocks)] // the comments are there, but the macro hides them
    unsafe fn reduce(&self, sources: &[ElementRun], to: ElementRun, op: ReduceOp) -> Result<()> {
        with_element!(self.dtype, T => {
            // SAFETY: the caller's promise; buffers are aligned for their elements.
            let read = |&place: &ElementRun| unsafe { slice::from_raw_parts(self.at(place).cast::<T>(), place.len) };
            let sources: SmallVec<[&[T]; 8]> = sources.iter().map(read).collect();
            // SAFETY: the caller's promise.
            let to = unsafe { slice::from_raw_parts_mut(self.at(to).cast::<MaybeUninit<T>>(), to.len) };
            reduce_slices(&sources, op, to)
        })
    }
}

/// Runs one piece of work of a plan.
///
/// # Safety
/// The plan fits the memory: its places lie within the buffers. The places that it reads have been written, and nothing
/// writes to them. Nothing else uses the places that it writes.
pub(super) unsafe fn run(memory: &PlanMemory, work: &LocalWork, op: Option<ReduceOp>) -> Result<()> {
    match work {
        // SAFETY: the caller's promise.
        &LocalWork::Copy { from, to } => unsafe { memory.copy(from, to) },
        LocalWork::Reduce { sources, to } => {
            let op = op.ok_or_else(|| Error::Unsupported("a reduction without an operation".into()))?;
            // SAFETY: the caller's promise.
            unsafe { memory.reduce(sources, *to, op)? };
        }
    }
    Ok(())
}
