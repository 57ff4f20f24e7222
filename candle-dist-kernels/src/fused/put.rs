//! Parts of two tensors that share their memory, written in one launch.
use super::call::KernelText;
#[cfg(feature = "cuda")]
use super::cuda;
use super::emulated::{self, HostArgument, HostLaunch};
use super::run::{runs_on, threads_of_each};
use crate::real::is_computed;
use crate::share_memory;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, DType, InplaceOp3, Layout, Result, Tensor};

/// Writes new elements into two contiguous tensors, at `offset` of dim `dim`.
///
/// # Errors
/// Those of [`Tensor::slice_set`]: shapes, dtypes and devices must fit, and what is written has memory of its own.
pub fn set_both(to: [&Tensor; 2], new: [&Tensor; 2], dim: usize, offset: usize) -> Result<()> {
    let fits = |to: &Tensor, new: &Tensor| {
        let has_place = |(d, (room, len)): (usize, (&usize, &usize))| match d == dim {
            true => offset + len <= *room,
            false => room == len,
        };
        (to.rank(), to.dtype()) == (new.rank(), new.dtype())
            && dim < to.rank()
            && to.dims().iter().zip(new.dims()).enumerate().all(has_place)
    };
    let is_one_launch = share_memory(to[0], to[1])
        && to[0].dtype() == to[1].dtype()
        && is_computed(to[0].dtype())
        && runs_on(to[0].device())
        && to.iter().zip(new).all(|(to, new)| {
            let are_dense = to.is_contiguous() && new.is_contiguous() && new.elem_count() > 0;
            are_dense && fits(to, new) && to.device().same_device(new.device()) && !share_memory(to, new)
        });
    if !is_one_launch {
        return to.iter().zip(new).try_for_each(|(to, new)| to.slice_set(new, dim, offset));
    }
    let runs = |which: usize| {
        let (to, new) = (to[which], new[which]);
        let inner: usize = to.dims()[dim + 1..].iter().product();
        let start = to.layout().start_offset() + offset * inner;
        [new.elem_count(), new.dims()[dim] * inner, start, to.dims()[dim] * inner]
    };
    let [first, second] = [runs(0), runs(1)];
    let put = PairWrite { dtype: to[0].dtype(), counts: [first, second].concat() };
    to[0].inplace_op3(new[0], new[1], &put)
}

/// Runs of elements of two tensors: how many elements they have, the length of a run, its first place, and the distance of the next.
struct PairWrite {
    dtype: DType,
    counts: Vec<usize>,
}

impl PairWrite {
    fn kernel(&self) -> String {
        format!("put_{}", self.dtype.as_str())
    }

    fn threads(&self) -> ([usize; 2], [usize; 2]) {
        threads_of_each(self.counts[0] + self.counts[4])
    }
}

impl InplaceOp3 for PairWrite {
    fn name(&self) -> &'static str {
        "set_both"
    }

    fn cpu_fwd(
        &self,
        to: &mut CpuStorage,
        _: &Layout,
        x: &CpuStorage,
        x_l: &Layout,
        y: &CpuStorage,
        y_l: &Layout,
    ) -> Result<()> {
        let mut arguments = Vec::new();
        for (storage, layout) in [(x, x_l), (y, y_l)] {
            let (at, len) = emulated::bytes(storage, layout)?;
            arguments.push(HostArgument::Read(at, len));
        }
        let (at, len) = emulated::bytes_mut(to)?;
        arguments.push(HostArgument::Written(at, len));
        let counts = self.counts.iter().map(|&count| (count as u64).to_le_bytes().to_vec());
        arguments.extend(counts.map(HostArgument::Value));
        let (grid, block) = self.threads();
        emulated::launch(&HostLaunch {
            source: KernelText::Put.source(),
            name: self.kernel(),
            grid: [grid[0] as u32, 1, 1],
            block: [block[0] as u32, 1, 1],
            arguments,
            memory: Vec::new(),
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        to: &mut CudaStorage,
        _: &Layout,
        x: &CudaStorage,
        x_l: &Layout,
        y: &CudaStorage,
        y_l: &Layout,
    ) -> Result<()> {
        // SAFETY: these are the kernel's parameters, in number and type. `set_both` has checked that the memory has all runs.
        unsafe { cuda::put(&self.kernel(), to, [(x, x_l), (y, y_l)], &self.counts, self.threads()) }
    }
}
