//! The timing of one row.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_shard::{DTensor, Placement, Replicate};

use super::args::Args;
use super::case::{CASES, Case};
use super::report::{Report, Row};
use crate::timing::median;

/// The global size of both dims.
const SIZE: usize = 8;
/// The number of new shapes, which measure the cost of a first call.
const NEW_SHAPES: usize = 201;
const MESHES: [&[(&str, usize)]; 2] = [&[("tp", 2)], &[("dp", 2), ("tp", 2)]];

/// Measures every op on every mesh; calls `begin` before each row.
///
/// # Errors
/// Those of the ops.
pub fn measure(args: &Args, begin: impl Fn(&str, usize)) -> Result<Report> {
    candle_dist::threads::settle(1);
    let mut rows = Vec::new();
    for axes in MESHES {
        let world = ProcessGroup::simulated(0, axes.iter().map(|(_, size)| size).product())?;
        let mesh = DeviceMesh::new(&world, axes)?;
        for case in &CASES {
            begin(case.op, axes.len());
            rows.push(row(case, &mesh, args)?);
        }
    }
    Ok(Report { rows })
}

/// Returns the number of rows.
pub fn rows() -> usize {
    MESHES.len() * CASES.len()
}

fn row(case: &Case, mesh: &DeviceMesh, args: &Args) -> Result<Row> {
    let (inputs, locals) = inputs(case, mesh, [SIZE; 2], args.gradients)?;
    let distributed = || (case.distributed)(&inputs);
    let plain = || (case.plain)(&locals, mesh);
    let (mut warm, mut bare) = (Vec::new(), Vec::new());
    for batch in 0..=args.batches {
        let times = [mean_ns(args.calls, plain)?, mean_ns(args.calls, distributed)?];
        // The first batch warms up.
        if batch > 0 {
            bare.push(times[0]);
            warm.push(times[1]);
        }
    }
    let (mut first, mut first_plain) = (Vec::new(), Vec::new());
    for i in 0..NEW_SHAPES {
        // The ops halve columns in several ways.
        let (inputs, locals) = self::inputs(case, mesh, [SIZE, SIZE + 8 * (i + 1)], args.gradients)?;
        first_plain.push(mean_ns(1, || (case.plain)(&locals, mesh))?);
        first.push(mean_ns(1, || (case.distributed)(&inputs))?);
    }
    let plain_ns = median(&mut bare);
    Ok(Row {
        op: case.op,
        axes: mesh.ndim(),
        plain_ns,
        warm_ns: median(&mut warm) - plain_ns,
        first_ns: median(&mut first) - median(&mut first_plain),
    })
}

/// Returns the inputs of a case and their shards. The global shape is `[rows, columns]`, transposed where a product
/// needs it.
fn inputs(
    case: &Case,
    mesh: &DeviceMesh,
    [rows, columns]: [usize; 2],
    gradients: bool,
) -> Result<(Vec<DTensor>, Vec<Tensor>)> {
    let product = case.op.starts_with("matmul");
    let mut inputs = Vec::new();
    for (i, &placement) in case.inputs.iter().enumerate() {
        let shape = if product && i == 1 { (columns, rows) } else { (rows, columns) };
        let whole = Tensor::ones(shape, DType::F32, &Device::Cpu)?;
        let input = DTensor::distribute(&whole, mesh, &on_axes(placement, i, mesh.ndim()))?;
        inputs.push(if gradients { input.to_var()?.0 } else { input });
    }
    let locals = inputs.iter().map(|input| input.to_local().clone()).collect();
    Ok((inputs, locals))
}

/// Returns a placement per axis: `placement` on the last one. If that replicates the first input, outer axes shard its
/// rows. All else is replicated.
fn on_axes(placement: Placement, input: usize, axes: usize) -> Vec<Placement> {
    let outer = if placement == Replicate && input == 0 { Placement::Shard(0) } else { Replicate };
    (1..axes).map(|_| outer).chain([placement]).collect()
}

/// Returns the mean time of `calls` calls, in nanoseconds.
fn mean_ns<T>(calls: usize, mut call: impl FnMut() -> candle_shard::Result<T>) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..calls {
        black_box(call()?);
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / calls as f64)
}
