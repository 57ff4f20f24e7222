//! Launches of the kernels of `rows.cu`.
use super::launch::{RowsLaunch, SOURCE};
use crate::element::{Element, with_element};
use crate::nvrtc::{Kernels, Rounding};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaView, DeviceRepr, LaunchConfig};
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::{CpuStorage, Error, InplaceOp3, Layout, Result, Storage, Tensor, bail};
use candle_dist_base::Fresh;

static KERNELS: Kernels = Kernels::new("device_rows/rows.cu", SOURCE, Rounding::Single);

/// Returns the name of the kernel for elements of a type.
fn name<T: Element>(op: &str) -> String {
    format!("{op}_{}", T::DTYPE.as_str())
}

fn config(rows: usize, width: usize) -> LaunchConfig {
    let RowsLaunch { block: [x, y], blocks } = RowsLaunch::over(rows, width);
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (x, y, 1), shared_mem_bytes: 0 }
}

/// Returns the elements of a contiguous operand.
fn view<'a, T: CudaDType>(storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let (start, end) =
        layout.contiguous_offsets().ok_or(Error::RequiresContiguous { op: "rows of a table" })?;
    Ok(storage.as_cuda_slice::<T>()?.slice(start..end))
}

/// See [`take`](super::take).
pub(super) fn take(table: &Tensor, rows: &Tensor, fill: f64) -> Result<Fresh> {
    let ((table, table_l), (rows, rows_l)) = (table.storage_and_layout(), rows.storage_and_layout());
    let (Storage::Cuda(table), Storage::Cuda(rows)) = (&*table, &*rows) else {
        bail!("rows of a table: the table and the numbers of its rows are on different devices");
    };
    let shape = (rows_l.dims()[0], table_l.dims()[1]);
    let taken = with_element!("rows of a table", table.dtype(), E => {
        take_as::<E>((table, table_l), (rows, rows_l), shape, fill)
    });
    Ok(Fresh { storage: Storage::Cuda(taken?), shape: shape.into() })
}

fn take_as<T: Element + CudaDType + DeviceRepr>(
    (table, table_l): (&CudaStorage, &Layout),
    (rows, rows_l): (&CudaStorage, &Layout),
    (count, width): (usize, usize),
    fill: f64,
) -> Result<CudaStorage> {
    let device = &table.device;
    let kernel = KERNELS.get(device, &name::<T>("take_rows"))?;
    // SAFETY: the kernel below writes all elements, and the stream orders it before whatever reads them.
    let mut out = unsafe { device.alloc::<T>(count * width)? };
    let (rows, table) = (view::<u32>(rows, rows_l)?, view::<T>(table, table_l)?);
    let (sizes, fill) = ([count as u64, width as u64], T::from_f64(fill));
    let mut call = kernel.call();
    call.value(&sizes[0]).value(&sizes[1]).read(&rows).read(&table).write(&mut out).value(&fill);
    // SAFETY: the arguments are those of the kernel in number and type. It reads `count` numbers of `rows`. Each is a row of the
    // table, which the kernel reads, or `NOWHERE`. It writes `count * width` elements of `out`.
    unsafe { call.launch(config(count, width)) }?;
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

/// See [`put`](super::put).
pub(super) fn put(table: &Tensor, rows: &Tensor, values: &Tensor) -> Result<()> {
    table.inplace_op3(rows, values, &Put)
}

struct Put;

impl InplaceOp3 for Put {
    fn name(&self) -> &'static str {
        "put_rows"
    }

    fn cpu_fwd(
        &self,
        _: &mut CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<()> {
        bail!("put_rows: a launch on a CUDA device met a table on the host")
    }

    fn cuda_fwd(
        &self,
        table: &mut CudaStorage,
        table_l: &Layout,
        rows: &CudaStorage,
        rows_l: &Layout,
        values: &CudaStorage,
        values_l: &Layout,
    ) -> Result<()> {
        with_element!("rows of a table", values.dtype(), E => {
            put_as::<E>((table, table_l), (rows, rows_l), (values, values_l))
        })
    }
}

fn put_as<T: Element + CudaDType + DeviceRepr>(
    (table, table_l): (&mut CudaStorage, &Layout),
    (rows, rows_l): (&CudaStorage, &Layout),
    (values, values_l): (&CudaStorage, &Layout),
) -> Result<()> {
    let device = &values.device;
    let kernel = KERNELS.get(device, &name::<T>("put_rows"))?;
    let (count, width) = (values_l.dims()[0], values_l.dims()[1]);
    let (start, end) =
        table_l.contiguous_offsets().ok_or(Error::RequiresContiguous { op: "rows of a table" })?;
    let mut table = table.as_cuda_slice_mut::<T>()?.slice_mut(start..end);
    let (rows, values) = (view::<u32>(rows, rows_l)?, view::<T>(values, values_l)?);
    let sizes = [count as u64, width as u64];
    let mut call = kernel.call();
    call.value(&sizes[0]).value(&sizes[1]).read(&rows).read(&values).write_part(&mut table);
    // SAFETY: the arguments are those of the kernel in number and type. It reads `count` numbers of `rows` and as many rows
    // of `values`, and writes these rows of the table, which has all of them.
    unsafe { call.launch(config(count, width)) }?;
    Ok(())
}
