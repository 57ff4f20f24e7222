//! Runs an operation over layouts and dtypes and compares values and gradients.

use std::{cell::RefCell, f64::consts::TAU};

use candle_core::{
    D, DType,
    Device::{self, Cpu},
    Result, Tensor, Var,
};
use candle_dist::RankContext;
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use std::sync::OnceLock;
use test_utils::Ranks;

pub(crate) type Op<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// How an input lies in the memory of its variable.
#[derive(Clone, Copy, Debug)]
pub(crate) enum View {
    Plain,
    /// The last two dims are swapped.
    Transposed,
    /// Elements of the last dim are skipped at both ends.
    Columns,
    /// Elements of the first dim are skipped at both ends: contiguous, with an offset.
    Rows,
}

pub(crate) const VIEWS: [View; 4] = [View::Plain, View::Transposed, View::Columns, View::Rows];

impl View {
    /// A tensor whose `apply` is `t`.
    fn stored(self, t: &Tensor) -> Result<Tensor> {
        let padded = |dim: usize| {
            let pad = |n| {
                let mut dims = t.dims().to_vec();
                dims[dim] = n;
                Tensor::full(7f32, dims, &Cpu)?.to_dtype(t.dtype())
            };
            Tensor::cat(&[pad(3)?, t.clone(), pad(2)?], dim)?.contiguous()
        };
        match self {
            Self::Transposed if t.rank() > 1 => t.transpose(D::Minus1, D::Minus2)?.contiguous(),
            Self::Columns => padded(t.rank() - 1),
            Self::Rows => padded(0),
            _ => Ok(t.clone()),
        }
    }

    fn apply(self, t: &Tensor) -> Result<Tensor> {
        match self {
            Self::Transposed if t.rank() > 1 => t.transpose(D::Minus1, D::Minus2),
            Self::Columns => t.narrow(D::Minus1, 3, t.dim(D::Minus1)? - 5),
            Self::Rows => t.narrow(0, 3, t.dim(0)? - 5),
            _ => Ok(t.clone()),
        }
    }
}

thread_local! {
    static RNG: RefCell<ChaCha8Rng> = RefCell::new(ChaCha8Rng::seed_from_u64(7));
}

/// Normal numbers, the same ones in every run; candle's CPU generator has no seed.
pub(crate) fn randn(dims: &[usize]) -> Tensor {
    RNG.with_borrow_mut(|rng| {
        let mut uniform = || (rng.next_u32() as f64 + 1.0) / 2f64.powi(32);
        let values = (0..dims.iter().product()).map(|_| {
            let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), uniform() * TAU);
            radius * angle.cos()
        });
        let values = values.collect::<Vec<_>>();
        Tensor::from_vec(values, dims, &Cpu).unwrap()
    })
}

/// Odd sizes, one element, rows longer and shorter than a vector, several leading dims, enough for two threads.
pub(crate) const SHAPES: [&[usize]; 8] =
    [&[5], &[1, 1], &[3, 7], &[4, 16], &[2, 3, 33], &[2, 2, 3, 5], &[9, 100], &[601, 257]];

/// The first GPU where tests run on GPUs, and otherwise the host.
pub(crate) fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| {
        let device = |_: &RankContext| Ok::<_, candle_dist::Error>(test_utils::device());
        Ranks::new(1, "a device").run(device).unwrap().remove(0)
    })
}

/// The value of `op` and the gradient of every input, for a fixed weighting of the outputs. The op runs on [`device`], and the
/// results are on the host. candle's own ops cannot compute tensors without elements on GPUs, so those stay on the host.
pub(crate) fn run(op: Op<'_>, inputs: &[Tensor], view: View) -> Result<Vec<Tensor>> {
    let is_empty = inputs.iter().any(|t| t.elem_count() == 0);
    run_on(if is_empty { &Cpu } else { device() }, op, inputs, view)
}

/// Like [`run`], on a device.
fn run_on(device: &Device, op: Op<'_>, inputs: &[Tensor], view: View) -> Result<Vec<Tensor>> {
    let stored = |t: &Tensor| Var::from_tensor(&view.stored(t)?.to_device(device)?);
    let vars = inputs.iter().map(stored).collect::<Result<Vec<_>>>()?;
    let views = vars.iter().map(|v| view.apply(v)).collect::<Result<Vec<_>>>()?;
    let y = op(&views)?;
    assert!(y.track_op(), "the result has left the graph");
    assert_eq!(y.dtype(), inputs[0].dtype());
    let count = y.elem_count();
    let weights = Tensor::from_iter((0..count).map(|i| (i as f64 * 0.7).sin()), device)?;
    let loss = (&y * weights.reshape(y.shape())?.to_dtype(y.dtype())?)?.sum_all()?;
    let grads = loss.backward()?;
    let to_host = |t: &Tensor| t.to_device(&Cpu);
    let mut results = vec![to_host(&y.detach())?];
    for var in &vars {
        let grad = grads.get(var).expect("every variable has a gradient");
        assert_eq!((grad.dims(), grad.dtype()), (var.dims(), var.dtype()));
        results.push(to_host(grad)?);
    }
    Ok(results)
}

/// The largest difference, relative to the largest element of `want` (or to 1).
pub(crate) fn distance(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.dims(), want.dims());
    if want.elem_count() == 0 {
        return 0.0;
    }
    let scalar =
        |t: Tensor| t.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f64>().unwrap();
    scalar((got.to_dtype(DType::F64).unwrap() - want).unwrap()) / scalar(want.clone()).max(1.0)
}

pub(crate) fn assert_close(got: &[Tensor], want: &[Tensor], tolerance: f64, what: &str) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let distance = distance(got, want);
        // Written so that NaN fails.
        assert!(distance <= tolerance, "{what}: result {i} is off by {distance:e}");
    }
}

/// Compares `fused` with `composed` in every float type and view.
pub(crate) fn compare(fused: Op<'_>, composed: Op<'_>, inputs: &[Tensor]) {
    // Off the host, large scores are scaled and rounded before the largest is taken off.
    let narrow = if device().is_cpu() { 1e-5 } else { 1e-3 };
    for (dtype, tolerance) in
        [(DType::F64, 1e-12), (DType::F32, narrow), (DType::F16, 2e-2), (DType::BF16, 1e-1)]
    {
        // Rounded first, so that both forms see the same numbers.
        let cast = inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect::<Vec<_>>();
        let exact = cast.iter().map(|t| t.to_dtype(DType::F64).unwrap()).collect::<Vec<_>>();
        for view in VIEWS {
            let what =
                format!("{dtype:?} {view:?} {:?}", inputs.iter().map(Tensor::dims).collect::<Vec<_>>());
            let got = run(fused, &cast, view).unwrap_or_else(|e| panic!("{what}: {e}"));
            let want = run_on(&Cpu, composed, &exact, view).unwrap();
            assert_close(&got, &want, tolerance, &what);
        }
    }
}

/// Compares the gradients of `op` in f64 with central differences.
pub(crate) fn differences(op: Op<'_>, inputs: &[Tensor]) {
    const STEP: f64 = 1e-5;
    let results = run(op, inputs, View::Plain).unwrap();
    let loss = |inputs: &[Tensor]| {
        let y = op(inputs).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        y.iter().enumerate().map(|(i, y)| y * (i as f64 * 0.7).sin()).sum::<f64>()
    };
    for (which, input) in inputs.iter().enumerate() {
        let grad = results[1 + which].flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let values = input.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        for i in 0..values.len() {
            let moved = |by: f64| {
                let mut values = values.clone();
                values[i] += by;
                let mut inputs = inputs.to_vec();
                inputs[which] = Tensor::from_vec(values, input.dims(), &Cpu).unwrap();
                loss(&inputs)
            };
            let want = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            assert!((grad[i] - want).abs() < 1e-7, "input {which}, element {i}: {} for {want}", grad[i]);
        }
    }
}
