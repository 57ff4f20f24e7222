//! The fused kernels of CUDA devices against the ops of the host, values and gradients. Their text is compiled as C++ and run here.
use candle_core::cpu_backend::CpuDevice;
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, Var};
use candle_dist_kernels::parts::{
    AdamWUpdate, Function, Goal, Goals, HostArgument, HostLaunch, HostRunner, KernelText, RowPiece,
    StripBuffer, StripCopy, StripStorage, candidate_keys, decode_attn, dropout, largest_keys, set_both,
    step_adam_w, weighted_cross_entropy, with_kernels_on_host,
};
use candle_dist_kernels::{
    LargestNumber, RopePairs, RowCandidates, add, add_rms_norm, causal_softmax, clamped_gate, flash_attn,
    layer_norm, masked_softmax, permute, reshape, rms_norm, rope, rope_both, silu_gate, softmax,
};
use candle_nn::ParamsAdamW;
use candle_shard::random::{Distribution, Stream, sample};
use device_text::{DeviceText, LaunchShape, TextMemory};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use test_utils::values;

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// The texts, compiled.
static TEXTS: LazyLock<Option<HashMap<&'static str, DeviceText>>> = LazyLock::new(|| {
    KernelText::ALL.iter().map(|text| Some((text.source(), DeviceText::for_test(text.source())?))).collect()
});

/// Runs a launch on the memory of its arguments.
fn run(launch: &HostLaunch) -> Result<()> {
    let text = &TEXTS.as_ref().unwrap()[launch.source];
    let (mut parameters, mut memory, mut read_only) = (Vec::new(), Vec::new(), Vec::new());
    for argument in &launch.arguments {
        parameters.push(match argument {
            HostArgument::Read(at, len) => {
                memory.push((at.expose_provenance(), *len));
                read_only.push(at.expose_provenance()..at.expose_provenance() + len);
                (at.expose_provenance() as u64).to_ne_bytes().to_vec()
            }
            HostArgument::Written(at, len) => {
                memory.push((at.expose_provenance(), *len));
                (at.expose_provenance() as u64).to_ne_bytes().to_vec()
            }
            HostArgument::Null => vec![0; 8],
            HostArgument::Value(bytes) => bytes.clone(),
        });
    }
    memory.extend(launch.memory.iter().map(|(at, len)| (at.expose_provenance(), *len)));
    // Views of one tensor overlap.
    memory.sort_unstable();
    let mut regions: Vec<TextMemory> = Vec::new();
    for (start, len) in memory.into_iter().filter(|(_, len)| *len > 0) {
        match regions.last_mut().filter(|last| start < last.start + last.size) {
            Some(last) => last.size = last.size.max(start + len - last.start),
            None => regions.push(TextMemory::new(start, len)),
        }
    }
    let shape = LaunchShape { grid: launch.grid, block: launch.block, shared: 0 };
    // SAFETY: the caller holds the memory of the arguments, and nothing else uses what the kernel writes.
    unsafe { text.launch(&launch.name, shape, &parameters, &mut regions) }
        .unwrap_or_else(|fault| panic!("{}: {fault}", launch.name));
    for region in &regions {
        for range in &region.written {
            let (start, end) = (region.start + range.start, region.start + range.end);
            let is_hit = read_only.iter().any(|constant| start < constant.end && constant.start < end);
            assert!(!is_hit, "{} writes what it is given to read", launch.name);
        }
    }
    Ok(())
}

/// Runs `f` with the kernels; `None` where no C++ compiler is.
fn with_kernels<R>(f: impl FnOnce() -> R) -> Option<R> {
    TEXTS.as_ref()?;
    let launches = Arc::new(AtomicUsize::new(0));
    let counted = launches.clone();
    let runner: HostRunner = Arc::new(move |launch| {
        counted.fetch_add(1, Ordering::Relaxed);
        run(launch)
    });
    let made = with_kernels_on_host(runner, f);
    assert!(launches.load(Ordering::Relaxed) > 0, "no kernel ran");
    Some(made)
}

/// How far numbers may be from those of the host, as a part of the largest.
fn allowed(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 3e-6,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    }
}

fn numbers(x: &Tensor) -> Vec<f64> {
    x.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Compares numbers; infinite ones and NaN must be the same.
fn compare(what: &str, got: &Tensor, want: &Tensor, allowed: f64) {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let (got, want) = (numbers(got), numbers(want));
    let most = want.iter().filter(|x| x.is_finite()).fold(1e-3, |most: f64, x| most.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
        let is_same = got == want || got.is_nan() && want.is_nan();
        assert!(
            is_same || (got - want).abs() <= allowed * most,
            "{what}, element {at}: {got} instead of {want}"
        );
    }
}

/// The result of an op and the gradients of its inputs, for a loss that weighs each element.
fn passes(vars: &[Var], op: &dyn Fn(&[Tensor]) -> Result<Tensor>) -> Vec<Tensor> {
    let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = op(&inputs).unwrap();
    let weights = values(y.dims(), 99, DType::F64).to_dtype(y.dtype()).unwrap();
    let grads = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
    let of = |var: &Var| grads.get(var).cloned().unwrap_or_else(|| panic!("no gradient of {:?}", var.dims()));
    [y.detach()].into_iter().chain(vars.iter().map(of)).collect()
}

/// Compares an op of variables of these shapes with that of the host, in all dtypes.
fn check(name: &str, shapes: &[&[usize]], op: &dyn Fn(&[Tensor]) -> Result<Tensor>) {
    for dtype in DTYPES {
        let var =
            |(seed, shape): (usize, &&[usize])| Var::from_tensor(&values(shape, seed as u64, dtype)).unwrap();
        let vars: Vec<Var> = shapes.iter().enumerate().map(var).collect();
        let what = format!("{name} {dtype:?} {shapes:?}");
        let want = passes(&vars, op);
        let Some(got) = with_kernels(|| passes(&vars, op)) else { return };
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            compare(
                &format!("{what}, {}", if at == 0 { "result" } else { "gradient" }),
                got,
                want,
                allowed(dtype),
            );
        }
        // Each run has the same bits.
        let again = with_kernels(|| passes(&vars, op)).unwrap();
        got.iter().zip(&again).for_each(|(got, again)| assert_eq!(numbers(got), numbers(again), "{what}"));
    }
}

#[test]
fn norms_are_those_of_the_host() {
    // One row, rows that no warp divides, several warps for a row, and several parts of rows for the gradients of weights.
    for shape in [&[1, 1][..], &[2, 3, 5], &[4, 33], &[3, 640], &[1100, 3]] {
        let width = &shape[shape.len() - 1..];
        check("rms_norm", &[shape, width], &|x| rms_norm(&x[0], &x[1], 1e-5));
        check("layer_norm", &[shape, width, width], &|x| layer_norm(&x[0], &x[1], &x[2], 1e-5));
    }
    check("rms_norm of a view", &[&[6, 4], &[6]], &|x| rms_norm(&x[0].t()?, &x[1], 1e-6));
    // A result that is used twice, and gradients that meet.
    check("a norm beside its input", &[&[3, 8], &[8]], &|x| {
        let sum = add(&x[0], &rms_norm(&x[0], &x[1], 1e-5)?)?;
        add(&rms_norm(&sum, &x[1], 1e-5)?, &sum)
    });
    check("the norm of a sum", &[&[3, 40], &[3, 40], &[40]], &|x| {
        let [sum, normed] = add_rms_norm(&x[0], &x[1], &x[2], 1e-5)?;
        Tensor::cat(&[sum, normed], 1)
    });
}

#[test]
fn rotary_positions_are_those_of_the_host() {
    for pairs in [RopePairs::Halves, RopePairs::Neighbors] {
        for (shape, offset) in [(&[5, 2][..], 0), (&[2, 7, 6], 3), (&[2, 3, 5, 8], 1)] {
            let (tokens, half) = (shape[shape.len() - 2], shape[shape.len() - 1] / 2);
            let table = |seed, dtype| values(&[tokens + offset, half], seed, dtype);
            check("rope", &[shape], &|x| {
                rope(&x[0], &table(1, x[0].dtype()), &table(2, x[0].dtype()), offset, pairs)
            });
        }
        // Heads behind tokens, as a projection makes them, and tables of each element of the batch.
        check("rope of a view", &[&[2, 5, 3, 4]], &|x| {
            let table = |seed| values(&[2, 9, 2], seed, x[0].dtype());
            rope(&x[0].transpose(1, 2)?, &table(1), &table(2), 2, pairs)
        });
        // Queries and keys have other numbers of heads.
        let both = |q: &Tensor, k: &Tensor| {
            let table = |seed| values(&[2, 9, 2], seed, q.dtype());
            let [q, k] = [q.transpose(1, 2)?, k.transpose(1, 2)?];
            rope_both([&q, &k], &table(1), &table(2), 2, pairs)
        };
        check("rope of both", &[&[2, 5, 3, 4], &[2, 5, 1, 4]], &|x| {
            let [q, k] = both(&x[0], &x[1])?;
            Tensor::cat(&[(&q * 2.0)?.flatten_all()?, k.flatten_all()?, q.flatten_all()?], 0)
        });
        check("rope of both, of which one has a gradient", &[&[2, 5, 1, 4]], &|x| {
            let [q, k] = both(&values(&[2, 5, 3, 4], 8, x[0].dtype()), &x[0])?;
            Tensor::cat(&[q.flatten_all()?, k.flatten_all()?], 0)
        });
        check("rope of both, of which one is used", &[&[2, 5, 3, 4]], &|x| {
            both(&x[0], &(&x[0] * 2.0)?).map(|[_, k]| k)
        });
    }
}

#[test]
fn queries_and_keys_turn_in_one_launch_and_back_in_another() {
    if TEXTS.is_none() {
        return;
    }
    let launches = Arc::new(AtomicUsize::new(0));
    let counted = launches.clone();
    let runner: HostRunner = Arc::new(move |launch| {
        counted.fetch_add(1, Ordering::Relaxed);
        run(launch)
    });
    with_kernels_on_host(runner, || {
        let [q, k] = [values(&[2, 3, 5, 4], 1, DType::F32), values(&[2, 1, 5, 4], 2, DType::F32)];
        let [q, k] = [q, k].map(|x| Var::from_tensor(&x).unwrap());
        let table = |seed| values(&[5, 2], seed, DType::F32);
        let turned = rope_both([&q, &k], &table(3), &table(4), 0, RopePairs::Halves).unwrap();
        assert_eq!(launches.load(Ordering::Relaxed), 1);
        let sums = turned.map(|x| x.sum_all().unwrap());
        (&sums[0] + &sums[1]).unwrap().backward().unwrap();
        assert_eq!(launches.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn new_tokens_of_two_memories_are_written_in_one_launch() {
    for dtype in DTYPES {
        for (offset, dim) in [(0, 2), (3, 2), (2, 1)] {
            // Keys and values of other widths, in one memory with a gap.
            let shapes = [[2, 4, 6, 5], [2, 4, 6, 3]];
            let counts = shapes.map(|shape| shape.iter().product::<usize>());
            let written = || -> Result<Vec<f64>> {
                let all = values(&[counts[0] + 7 + counts[1]], 1, dtype).copy()?;
                let places = [(0, counts[0]), (counts[0] + 7, counts[1])];
                let to: Vec<Tensor> = places
                    .into_iter()
                    .zip(shapes)
                    .map(|((start, count), shape)| all.narrow(0, start, count)?.reshape(&shape[..]))
                    .collect::<Result<_>>()?;
                let new = shapes.map(|mut shape| {
                    shape[dim] = 2;
                    values(&shape, 2 + shape[3] as u64, dtype)
                });
                set_both([&to[0], &to[1]], [&new[0], &new[1]], dim, offset)?;
                Ok(numbers(&all))
            };
            let want = written().unwrap();
            let Some(got) = with_kernels(|| written().unwrap()) else { return };
            assert_eq!(got, want, "{dtype:?}, {offset} of dim {dim}");
        }
    }
    let (memory, other) = (values(&[2, 3], 1, DType::F32), values(&[2, 4], 2, DType::F32));
    for new in [[&other, &other], [&memory, &memory]] {
        assert!(set_both([&memory, &memory], new, 0, 0).is_err(), "a wide one, and the memory itself");
    }
}

#[test]
fn functions_and_gates_are_those_of_the_host() {
    for shape in [&[1][..], &[3, 100], &[5, 7, 9]] {
        check("silu_gate", &[shape, shape], &|x| silu_gate(&x[0], &x[1]));
        check("clamped_gate", &[shape, shape], &|x| clamped_gate(&x[0], &(&x[1] * 3.0)?, 1.702, 1.0));
    }
    check("silu_gate of views", &[&[4, 6], &[6, 4]], &|x| silu_gate(&x[0].t()?, &x[1]));
    let functions = [
        Function::Gelu,
        Function::GeluErf,
        Function::Silu,
        Function::Mish,
        Function::Sigmoid,
        Function::Tanh,
        Function::Erf,
        Function::HardSwish,
        Function::Elu(0.7),
        Function::LeakyRelu(0.0),
        Function::LeakyRelu(0.1),
        Function::Power(2.0),
        Function::Recip,
        Function::Rsqrt,
    ];
    let sizes = [0.3, 1.0, 3.0, 5.0, 12.0, 90.0, 300.0, 6e4, 1e8, 1e19, 1e30, f64::INFINITY];
    let xs: Vec<f64> = sizes.iter().flat_map(|&x| [x, -x]).collect();
    for (function, dtype) in itertools::iproduct!(functions, DTYPES) {
        // One number at a time: an infinite sum of slopes would hide the others.
        let of = |x: f64| {
            let var =
                Var::from_tensor(&Tensor::new(&[x], &Device::Cpu).unwrap().to_dtype(dtype).unwrap()).unwrap();
            let y = function.apply(&var).unwrap();
            let grads = y.sum_all().unwrap().backward().unwrap();
            [y.detach(), grads.get(&var).unwrap().clone()]
        };
        for &x in &xs {
            let want = of(x);
            let Some(got) = with_kernels(|| of(x)) else { return };
            let part = if dtype == DType::F32 { 1e-5 } else { allowed(dtype) };
            got.iter()
                .zip(&want)
                .for_each(|(got, want)| compare(&format!("{function:?} {dtype:?} {x}"), got, want, part));
        }
    }
}

/// The kernels take a limit of 0 for none.
#[test]
fn a_limit_that_is_0_as_f32_is_a_limit() {
    if TEXTS.is_none() {
        return;
    }
    for dtype in DTYPES {
        let [x, gate] = [1, 2].map(|seed| values(&[7], seed, dtype));
        let op = || clamped_gate(&x, &gate, 1.702, 1e-60).unwrap();
        compare(&format!("{dtype:?}"), &with_kernels_on_host(Arc::new(run), op), &op(), allowed(dtype));
    }
}

#[test]
fn softmax_is_that_of_the_host() {
    for shape in [&[1, 1][..], &[3, 5], &[2, 4, 33], &[2, 700]] {
        check("softmax", &[shape], &|x| softmax(&x[0]));
    }
    for shape in [&[1, 1][..], &[5, 2], &[3, 2, 5], &[2, 40, 40]] {
        check("causal_softmax", &[shape], &|x| causal_softmax(&x[0], 0.7));
        check("causal_softmax of negative scale", &[shape], &|x| causal_softmax(&x[0], -0.3));
    }
    for (shape, mask) in [(&[2, 3, 4][..], &[4][..]), (&[2, 3, 4], &[3, 4]), (&[2, 3, 5, 6], &[2, 1, 5, 6])] {
        check("masked_softmax", &[shape], &|x| {
            let hidden =
                |at: usize| if at < 4 || at.is_multiple_of(5) { f64::NEG_INFINITY } else { at as f64 * 0.3 };
            let mask =
                Tensor::from_iter((0..mask.iter().product()).map(hidden), &Device::Cpu)?.reshape(mask)?;
            masked_softmax(&x[0], &mask.to_dtype(x[0].dtype())?, 0.7)
        });
    }
}

#[test]
fn cross_entropy_over_pieces_of_the_classes_is_that_of_the_host() {
    let row = |class, peak, spread| Goal { class, peak, spread };
    for (classes, spread) in [(3, vec![0.1, 0.0, 0.3]), (40, Vec::new()), (700, Vec::new())] {
        check("cross_entropy", &[&[4, classes]], &|x| {
            let share = if spread.is_empty() { 0.0 } else { 1.0 };
            let rows = vec![
                row(Some(2), 0.7, share),
                row(None, 0.0, 0.0),
                row(None, 1.3, share),
                row(Some(1), 1.0, 0.0),
            ];
            let goals = Goals { rows, spread: spread.clone(), spread_total: 0.4 * share };
            // Another rank has larger logits in some rows, and smaller ones in others.
            let join = |mine: &Tensor, op| {
                let other = Tensor::new(&[3f64, -9.0, 0.5, -0.2], &Device::Cpu)?.to_dtype(mine.dtype())?;
                match op {
                    candle_dist::ReduceOp::Max => mine.maximum(&other),
                    _ => mine + other.exp()?,
                }
            };
            weighted_cross_entropy(&(&x[0] * 2.0)?, goals, &join)
        });
    }
}

/// Steps of AdamW on many tensors, of which some are empty and one has several blocks. Returns all that they change.
fn adam_w(dtype: DType, has_master: bool, is_state_wide: bool, is_grad_wide: bool) -> Vec<Tensor> {
    let wide = candle_dist::sum_dtype(dtype);
    let lens: Vec<usize> = (0..60).map(|at| if at == 50 { 20_000 } else { at * at % 37 }).collect();
    let var = |len: usize, seed: usize, dtype: DType| {
        Var::from_tensor(&values(&[len], seed as u64, dtype)).unwrap()
    };
    let (mut vars, mut masters, mut moments) = (Vec::new(), Vec::new(), Vec::new());
    for (seed, &len) in lens.iter().enumerate() {
        let x = var(len, seed, dtype);
        masters.push(has_master.then(|| Var::from_tensor(&x.to_dtype(wide).unwrap()).unwrap()));
        vars.push(x);
        let state = if is_state_wide { wide } else { dtype };
        let moment = || Var::from_tensor(&Tensor::zeros(len, state, &Device::Cpu).unwrap()).unwrap();
        moments.push([moment(), moment()]);
    }
    let params = ParamsAdamW { lr: 0.1, weight_decay: 0.3, ..ParamsAdamW::default() };
    for step in 1..4 {
        let grad = if is_grad_wide { wide } else { dtype };
        let grads: Vec<Tensor> = lens
            .iter()
            .enumerate()
            .map(|(at, &len)| values(&[len], (1000 * step + at) as u64, grad))
            .collect();
        let update = |at: usize| AdamWUpdate {
            steps: (step + at % 3) as u32,
            var: &vars[at],
            master: masters[at].as_ref(),
            moments: moments[at].each_ref(),
            grad: &grads[at],
        };
        step_adam_w(&params, &(0..lens.len()).map(update).collect::<Vec<_>>()).unwrap();
        // Written from outside: the master follows.
        vars[7].set(&(vars[7].as_detached_tensor() * 1.5).unwrap()).unwrap();
    }
    let changed = vars.iter().chain(masters.iter().flatten()).chain(moments.iter().flatten());
    changed.map(|var| var.as_detached_tensor()).collect()
}

#[test]
fn adam_w_of_many_tensors_has_the_bits_of_the_host() {
    for (dtype, flags) in itertools::iproduct!(DTYPES, 0..6) {
        let (has_master, is_state_wide, is_grad_wide) = match flags {
            0 | 1 => (false, false, flags == 1),
            2 | 3 => (false, true, flags == 3),
            _ => (true, true, flags == 5),
        };
        if matches!(dtype, DType::F32 | DType::F64) && flags > 0 {
            continue;
        }
        let run = || adam_w(dtype, has_master, is_state_wide, is_grad_wide);
        let want = run();
        let Some(got) = with_kernels(run) else { return };
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(numbers(got), numbers(want), "{dtype:?} {flags}, tensor {at}");
        }
    }
}

/// A variable that comes twice, gradients that are variables, and moments of another dtype, which no kernel has.
#[test]
fn adam_w_of_tensors_that_share_memory_has_the_bits_of_the_host() {
    let steps = |dtype: DType, of_moments: DType| -> Vec<Tensor> {
        let vars: Vec<Var> =
            (0..4).map(|at| Var::from_tensor(&values(&[6, 6], at, dtype)).unwrap()).collect();
        let grad_of_0 = vars[1].as_detached_tensor();
        let grad_of_1 = vars[0].as_detached_tensor().t().unwrap();
        let grad_of_3 = vars[3].as_detached_tensor();
        let plain = values(&[6, 6], 9, dtype);
        let given =
            [(0, &plain), (0, &grad_of_0), (2, &plain), (1, &grad_of_1), (0, &plain), (3, &grad_of_3)];
        let moment = || Var::zeros((6, 6), of_moments, &Device::Cpu).unwrap();
        let moments: Vec<[Var; 2]> = given.iter().map(|_| [moment(), moment()]).collect();
        let params = ParamsAdamW { lr: 0.1, weight_decay: 0.3, ..ParamsAdamW::default() };
        let updates = given.iter().zip(&moments).map(|(&(var, grad), moments)| AdamWUpdate {
            steps: 1,
            var: &vars[var],
            master: None,
            moments: moments.each_ref(),
            grad,
        });
        step_adam_w(&params, &updates.collect::<Vec<_>>()).unwrap();
        vars.iter().chain(moments.iter().flatten()).map(|var| var.as_detached_tensor()).collect()
    };
    for (dtype, of_moments) in
        [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::F16)]
    {
        let want = steps(dtype, of_moments);
        if TEXTS.is_none() {
            return;
        }
        let got = with_kernels_on_host(Arc::new(run), || steps(dtype, of_moments));
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(numbers(got), numbers(want), "{dtype:?} with moments of {of_moments:?}, tensor {at}");
        }
    }
}

/// Strips of these many tensors, of unlike sizes and distances, copied as candle copies them.
fn strips(from: DType, to: DType, count: usize) -> [Vec<CpuStorage>; 2] {
    let sources: Vec<Tensor> =
        (0..count).map(|at| (values(&[40, 50], at as u64, DType::F32) * 100.0).unwrap()).collect();
    let sources: Vec<Tensor> = sources.iter().map(|x| x.abs().unwrap().to_dtype(from).unwrap()).collect();
    let guards: Vec<_> = sources.iter().map(|x| x.storage_and_layout().0).collect();
    let storages: Vec<&CpuStorage> = guards
        .iter()
        .map(|guard| match &**guard {
            Storage::Cpu(storage) => storage,
            _ => panic!("not on the host"),
        })
        .collect();
    let (mut buffers, mut want) = (Vec::new(), Vec::new());
    for halves in [1, 2] {
        let (mut strips, mut rows, mut total) = (Vec::new(), Vec::new(), 0);
        for (at, source) in storages.iter().enumerate() {
            // Widths that words of 16 bytes divide, and others; one run, none, and more words than a block has.
            let (start, width) = [(0, 50), (8, 16), (3, 7), (0, 0)][at % 4];
            let height = [40, 1, 39][at % 3];
            let block = sources[at].narrow(0, 40 - height, height).unwrap().narrow(1, start, width).unwrap();
            for half in 0..halves {
                // The halves of a buffer's runs lie between each other.
                let (from, step) = ((40 - height) * 50 + start, 50);
                let to = (total + half * width, halves * width);
                strips.push(StripCopy { source: *source, rows: height, len: width, from: (from, step), to });
            }
            total += halves * height * width;
            let both = Tensor::cat(&vec![&block; halves], 1).unwrap();
            rows.push(both.to_dtype(to).unwrap().flatten_all().unwrap());
        }
        buffers.push(StripBuffer { dtype: to, total, strips });
        let rows = Tensor::cat(&rows, 0).unwrap();
        let Storage::Cpu(storage) = &*rows.storage_and_layout().0 else { panic!("not on the host") };
        want.push(storage.clone());
    }
    [<CpuStorage as StripStorage>::copy_strips(&CpuDevice, &buffers).unwrap(), want]
}

#[test]
fn strips_of_many_tensors_are_copied_in_few_launches() {
    if TEXTS.is_none() {
        return;
    }
    let same = [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];
    let pairs = same.map(|dtype| (dtype, dtype));
    for (from, to) in pairs.into_iter().chain([(DType::BF16, DType::F32), (DType::F16, DType::F32)]) {
        for count in [1, 30] {
            let launches = Arc::new(AtomicUsize::new(0));
            let counted = launches.clone();
            let runner: HostRunner = Arc::new(move |launch| {
                counted.fetch_add(1, Ordering::Relaxed);
                run(launch)
            });
            let [got, want] = with_kernels_on_host(runner, || strips(from, to, count));
            for (got, want) in got.into_iter().zip(want) {
                let bits = |storage: &CpuStorage| format!("{storage:?}");
                assert_eq!(bits(&got), bits(&want), "{from:?} to {to:?}, {count} tensors");
            }
            // Of three in four tensors there are three strips, 64 in a launch.
            assert_eq!(launches.load(Ordering::Relaxed), if count == 1 { 1 } else { 2 });
        }
    }
}

#[test]
fn dropout_and_its_gradient_have_the_bits_of_the_host() -> candle_shard::Result<()> {
    let stream = Stream::new(7, "dropout");
    // A whole tensor, columns of one, and a box of five dims, which no kernel takes.
    let blocks: [(&[usize], &[std::ops::Range<usize>]); 4] = [
        (&[40, 70], &[0..40, 0..70]),
        (&[40, 70], &[3..40, 5..66]),
        (&[3, 4, 5, 6], &[1..3, 0..3, 1..4, 2..6]),
        (&[3, 3, 3, 3, 3], &[0..2, 0..2, 0..2, 0..2, 0..2]),
    ];
    for ((shape, block), dtype) in itertools::iproduct!(blocks, DTYPES) {
        for p in [0.3, 1.0] {
            let dims: Vec<usize> = block.iter().map(std::iter::ExactSizeIterator::len).collect();
            let x = Var::from_tensor(&values(&dims, 3, dtype))?;
            let factor = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
            let pass = || -> Result<Option<[Tensor; 2]>> {
                let Some(y) = dropout(&x, stream, [1.0 - p, factor], shape, block)? else { return Ok(None) };
                let grads = (&y * values(&dims, 4, dtype))?.sum_all()?.backward()?;
                Ok(Some([y, grads.get(&x).unwrap().clone()]))
            };
            assert!(pass()?.is_none(), "the host has a mask");
            if shape.len() == 5 {
                assert!(with_kernels_on_host(Arc::new(run), pass)?.is_none());
                continue;
            }
            let Some(got) = with_kernels(pass) else { return Ok(()) };
            let keep = Distribution::Bernoulli { p: 1.0 - p };
            let mask = sample(stream, keep, shape, block, dtype, &Device::Cpu)?.affine(factor, 0.0)?;
            for (got, seed) in got?.unwrap().iter().zip([3, 4]) {
                let want = (values(&dims, seed, dtype) * &mask)?;
                assert_eq!(numbers(got), numbers(&want), "{shape:?} {dtype:?} {p}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_largest_of_rows_is_that_of_the_host() {
    for (rows, width) in [(1, 1), (3, 31), (2, 5000), (2, 9001)] {
        for dtype in DTYPES {
            let mut x = values(&[rows, width], 5, dtype);
            if width > 30 {
                // Equal numbers, a negative row, and one that has a NaN behind an infinity.
                x = ((x * 4.0).unwrap().round().unwrap() / 4.0).unwrap();
                let row = |at: usize| x.narrow(0, at, 1).unwrap();
                let mut rows: Vec<Tensor> = (0..rows).map(row).collect();
                rows[0] = (rows[0].abs().unwrap() * -1.0).unwrap();
                let odd = Tensor::new(&[[f64::INFINITY, f64::NAN]], &Device::Cpu).unwrap();
                let last = rows.len() - 1;
                let rest = rows[last].narrow(1, 0, width - 2).unwrap();
                rows[last] = Tensor::cat(&[rest, odd.to_dtype(dtype).unwrap()], 1).unwrap();
                x = Tensor::cat(&rows, 0).unwrap();
            }
            let temperatures: Vec<f64> = (0..rows).map(|row| row as f64 / 2.0).collect();
            // The last row has no finite largest number, so no sum.
            let piece = RowPiece::new(7, [1, 3], width + 9);
            let candidates = || {
                let keys = candidate_keys(&x, &temperatures, &piece).unwrap();
                RowCandidates::of_keys(&keys, &temperatures).unwrap()
            };
            let want = candidates();
            let Some(got) = with_kernels(candidates) else { return };
            for (got, want) in got.iter().zip(&want) {
                assert_eq!(
                    format!("{:?}", (&got.numbers, got.rest)),
                    format!("{:?}", (&want.numbers, want.rest))
                );
                assert!((got.sum - want.sum).abs() <= 1e-12 * want.sum, "{} {}", got.sum, want.sum);
            }
            assert!(rows < 3 || want[1].sum > 1.0, "{want:?}");
            let keys = || largest_keys(&x, 7, width + 9).unwrap();
            let want = LargestNumber::of_keys(&keys()).unwrap();
            let Some(got) = with_kernels(keys) else { return };
            let got = LargestNumber::of_keys(&got).unwrap();
            assert_eq!(format!("{got:?}"), format!("{want:?}"), "{rows} rows of {width} {dtype:?}");
            assert!(
                width < 30
                    || want[rows - 1].value == f32::INFINITY && want[rows - 1].place as usize == width + 5
            );
        }
    }
}

/// Turned views give their gradients as they are: of the heads of projections, rotated and turned back.
#[test]
fn gradients_pass_turned_views_without_copies() {
    let heads = |x: &Tensor| permute(&reshape(x, (2, 5, (), 4))?, (0, 2, 1, 3));
    for pairs in [RopePairs::Halves, RopePairs::Neighbors] {
        check("rope of turned projections", &[&[2, 5, 12], &[2, 5, 4], &[2, 5, 4]], &|x| {
            let table = |seed| values(&[2, 9, 2], seed, x[0].dtype());
            // Results of this crate, not variables.
            let [q, k, v] = [0, 1, 2].map(|at| add(&x[at], &x[at]));
            let [turned, k] = rope_both([&heads(&q?)?, &heads(&k?)?], &table(1), &table(2), 2, pairs)?;
            let back = |x: &Tensor| permute(x, (0, 2, 1, 3));
            let v = back(&heads(&v?)?)?;
            flash_attn(&back(&turned)?, &back(&k)?, &v, 0.5, true)
        });
    }
}

/// One launch does not reach the memory of another GPU.
#[test]
fn tensors_of_several_gpus_are_refused() {
    if test_utils::skip_unless_gpus(2) {
        return;
    }
    let gpus = [0, 1].map(|gpu| Device::new_cuda_with_stream(gpu).unwrap());
    let on = |dims: &[usize], gpu: usize| values(dims, 1, DType::F32).to_device(&gpus[gpu]).unwrap();
    type OnGpu<'a> = &'a dyn Fn(usize) -> Result<Tensor>;
    let ops: [(&str, OnGpu<'_>); 6] = [
        ("rms_norm", &|other| rms_norm(&on(&[3, 8], 0), &on(&[8], other), 1e-5)),
        ("silu_gate", &|other| silu_gate(&on(&[3, 8], 0), &on(&[3, 8], other))),
        ("masked_softmax", &|other| masked_softmax(&on(&[3, 8], 0), &on(&[8], other), 1.0)),
        ("rope", &|other| {
            let tables = [0, other].map(|gpu| on(&[3, 4], gpu));
            rope(&on(&[3, 8], 0), &tables[0], &tables[1], 0, RopePairs::Halves)
        }),
        ("flash_attn", &|other| {
            let [q, k, v] = [0, other, 0].map(|gpu| on(&[1, 3, 2, 8], gpu));
            flash_attn(&q, &k, &v, 0.5, true)
        }),
        ("decode_attn", &|other| {
            let kept = [other, 0].map(|gpu| on(&[1, 2, 3, 8], gpu));
            decode_attn(&on(&[1, 2, 1, 8], 0), &[kept], 0.5.into(), false)
        }),
    ];
    for (name, op) in ops {
        assert!(op(0).unwrap().device().same_device(&gpus[0]), "{name}");
        let error = op(1).unwrap_err().to_string();
        assert!(error.contains("device mismatch"), "{name}: {error}");
    }
}
