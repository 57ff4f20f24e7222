//! The kernels of attention, run from their text, against the host's attention.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use super::launch::{
    AttentionLaunches, AttentionParameters, KeyBounds, PassLaunch, ProductUnits, RowStrides, SOURCE,
};
use super::node::sizes;
use super::{KeyBlock, Scale, Visible};
use crate::flash_attn::flash_attn_of_blocks;
use candle_core::{DType, Device::Cpu, Tensor, Var, WithDType};
use device_text::{DeviceText, LaunchShape, PlainNumber, TextArgument};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::OnceLock;

/// The text for elements of a dtype; `None` without a C++ compiler.
fn text(dtype: DType) -> Option<&'static DeviceText> {
    static TEXTS: [OnceLock<Option<DeviceText>>; 3] = [const { OnceLock::new() }; 3];
    let at = [DType::F32, DType::F16, DType::BF16].iter().position(|&known| known == dtype).unwrap();
    let element = [
        "#define ELEMENT float\n",
        "#define ELEMENT f16\n#define IS_SHORT\n",
        "#define ELEMENT bf16\n#define IS_SHORT\n",
    ];
    TEXTS[at].get_or_init(|| DeviceText::for_test(&[element[at], SOURCE].concat())).as_ref()
}

/// A call of attention: its inputs as f32, of which those of 16 bits are rounded, and the gradient of its result.
struct Case {
    inputs: [Tensor; 3],
    grad: Tensor,
    blocks: Vec<KeyBlock>,
    scale: Scale,
    log_sums: bool,
    /// Whether heads come before rows in memory.
    is_turned: bool,
    /// The elements before each input in its memory.
    before: usize,
    units: ProductUnits,
}

/// Returns the result and the gradients of the inputs, by the kernels.
fn by_kernels<E: WithDType + PlainNumber>(case: &Case) -> Option<Vec<Vec<f32>>> {
    match case.log_sums {
        true => run::<E, f32>(case),
        false => run::<E, E>(case),
    }
}

fn run<E: WithDType + PlainNumber, O: WithDType + PlainNumber>(case: &Case) -> Option<Vec<Vec<f32>>> {
    let text = text(E::DTYPE)?;
    let [q, k, v] = &case.inputs;
    let sizes = sizes([q, k, v]).unwrap();
    let seen = KeyBounds::new(&case.blocks, &sizes);
    let laid = case.inputs.each_ref().map(|x| match case.is_turned {
        true => x.transpose(1, 2).unwrap().force_contiguous().unwrap().transpose(1, 2).unwrap(),
        false => x.clone(),
    });
    let strides = laid.each_ref().map(|x| RowStrides::of(x.layout()).unwrap());
    let call =
        AttentionParameters::new(&sizes, strides, case.scale, &seen, (E::DTYPE, case.log_sums)).unwrap();
    let memory = |x: &Tensor| {
        let x = if case.is_turned { x.transpose(1, 2).unwrap() } else { x.clone() };
        let x = x.flatten_all().unwrap().to_dtype(E::DTYPE).unwrap().to_vec1::<E>().unwrap();
        [vec![E::from_f64(7.0); case.before], x].concat()
    };
    let [q, k, v] = laid.each_ref().map(memory);
    let (rows, columns) = (sizes.rows(), sizes.width + usize::from(case.log_sums));
    let AttentionLaunches { forward, inner: of_inner, of_keys, of_queries } =
        call.launches(sizes.batch, E::DTYPE, case.units);
    let call_bytes = || {
        // SAFETY: a structure of numbers without gaps.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const call).cast::<u8>(), size_of_val(&call)) };
        TextArgument::of_bytes(bytes.to_vec())
    };
    let launch = |launch: PassLaunch, arguments: &mut [TextArgument<'_>]| {
        let shape =
            LaunchShape { grid: launch.grid, block: [launch.threads, 1, 1], shared: launch.shared as usize };
        text.run(&launch.name, shape, arguments).unwrap_or_else(|fault| panic!("{fault}"));
    };
    let (mut out, mut norms) = (vec![O::from_f64(7.0); rows * columns], vec![7f32; 2 * rows]);
    launch(
        forward,
        &mut [
            call_bytes(),
            TextArgument::read_from(&q, case.before),
            TextArgument::read_from(&k, case.before),
            TextArgument::read_from(&v, case.before),
            TextArgument::read(&seen.bounds),
            TextArgument::written(&mut out),
            TextArgument::written(&mut norms),
        ],
    );
    let grad = case.grad.flatten_all().unwrap().to_dtype(O::DTYPE).unwrap().to_vec1::<O>().unwrap();
    let mut inner = vec![7f32; rows];
    launch(
        of_inner,
        &mut [
            call_bytes(),
            TextArgument::value(rows as i64),
            TextArgument::read(&out),
            TextArgument::read(&grad),
            TextArgument::written(&mut inner),
        ],
    );
    let mut grads = [&q, &k, &v].map(|x| vec![E::from_f64(7.0); x.len() - case.before]);
    let [dq, dk, dv] = &mut grads;
    for (pass, written) in [(of_keys, vec![dk, dv]), (of_queries, vec![dq])] {
        let mut arguments = vec![
            call_bytes(),
            TextArgument::read_from(&q, case.before),
            TextArgument::read_from(&k, case.before),
            TextArgument::read_from(&v, case.before),
            TextArgument::read(&seen.bounds),
            TextArgument::read(&grad),
            TextArgument::read(&norms),
            TextArgument::read(&inner),
        ];
        arguments.extend(written.into_iter().map(|x| TextArgument::written(x)));
        launch(pass, &mut arguments);
    }
    let wide = |x: &[E]| x.iter().map(|x| x.to_f64() as f32).collect();
    let out = out.iter().map(|x| x.to_f64() as f32).collect();
    Some([vec![out], grads.iter().map(|x| wide(x)).collect()].concat())
}

/// Returns the same by the host, in f64.
fn by_host(case: &Case) -> Vec<Vec<f32>> {
    let vars = case.inputs.each_ref().map(|x| Var::from_tensor(&x.to_dtype(DType::F64).unwrap()).unwrap());
    let [q, k, v] = vars.each_ref().map(|var| var.as_tensor());
    let out = flash_attn_of_blocks([q, k, v], case.scale, case.blocks.clone(), case.log_sums).unwrap();
    let loss = (&out * case.grad.to_dtype(DType::F64).unwrap()).unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();
    let made = [vec![out], vars.iter().map(|var| grads.get(var).unwrap().clone()).collect()].concat();
    let elements = |x: &Tensor| x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap();
    made.iter().map(elements).collect()
}

/// Compares both; NaN must be in the same places.
fn check(case: &Case, dtype: DType, what: &str) {
    let (made, bound) = match dtype {
        DType::F32 => (by_kernels::<f32>(case), 2e-5),
        DType::F16 => (by_kernels::<f16>(case), 2e-3),
        _ => (by_kernels::<bf16>(case), 1.5e-2),
    };
    let Some(made) = made else { return };
    for (part, (made, want)) in made.iter().zip(by_host(case)).enumerate() {
        assert_eq!(made.len(), want.len());
        let lost = made.iter().zip(&want).position(|(a, b)| a.is_finite() != b.is_finite());
        assert_eq!(lost, None, "{what}, part {part}: {:?}", lost.map(|at| (made[at], want[at])));
        let finite = || made.iter().zip(&want).filter(|(_, want)| want.is_finite());
        let off = finite().map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt();
        let all = finite().map(|(_, b)| b * b).sum::<f32>().sqrt();
        assert!(off <= bound * all + 1e-6, "{what}, part {part}: {off} of {all}");
    }
}

/// A generator of small numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn tensor(&mut self, dims: [usize; 4], dtype: DType) -> Tensor {
        let numbers = dims.iter().product();
        let drawn = (0..numbers).map(|_| (self.below(4001) as f32 - 2000.0) / 1000.0);
        let drawn = Tensor::from_iter(drawn, &Cpu).unwrap().reshape(&dims).unwrap();
        drawn.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap()
    }

    /// Who sees which of `keys` keys.
    fn visible(&mut self, batch: usize, queries: usize, keys: usize) -> Visible {
        let (offset, width) = (self.below(keys + 1) as i64 - 3, 1 + self.below(keys) as i64);
        let at = |key: i64| key.clamp(0, keys as i64) as usize;
        let by_distance = |i: usize| at(i as i64 + offset - width)..at(i as i64 + offset);
        match self.below(5) {
            0 => Visible::plain(queries, keys, false),
            1 => Visible::plain(queries, keys, true),
            2 => Visible::new(vec![(0..queries).map(by_distance).collect()]),
            kind => {
                let mut list = || -> Vec<Range<usize>> {
                    let mut range = || {
                        let start = self.below(keys + 1);
                        start..start + self.below(keys + 1 - start)
                    };
                    (0..queries).map(|_| range()).collect()
                };
                let lists = if kind == 3 { 1 } else { batch };
                Visible::new((0..lists).map(|_| list()).collect())
            }
        }
    }

    fn case(&mut self, dtype: DType, widths: &[usize], most: usize) -> (Case, String) {
        let (batch, kv_heads, group) = (1 + self.below(2), 1 + self.below(2), 1 + self.below(3));
        let (queries, keys, dim, width) =
            (1 + self.below(most), 2 + self.below(most), self.of(widths), self.of(widths));
        let cut = if self.below(3) == 0 { 1 + self.below(keys - 1) } else { keys };
        let rows = [0..cut, cut..keys];
        let blocks: Vec<KeyBlock> = rows
            .into_iter()
            .filter(|rows| !rows.is_empty())
            .map(|rows| KeyBlock { visible: self.visible(batch, queries, rows.len()), rows })
            .collect();
        let log_sums = self.below(3) == 0;
        let scale =
            Scale { factor: self.of(&[0.3, 1.0, -0.4, 0.05]), cap: self.of(&[None, None, Some(1.5)]) };
        let heads = kv_heads * group;
        let inputs = [[queries, heads, dim], [keys, kv_heads, dim], [keys, kv_heads, width]]
            .map(|[rows, heads, columns]| self.tensor([batch, rows, heads, columns], dtype));
        let of_result = if log_sums { DType::F32 } else { dtype };
        let grad = self.tensor([batch, queries, heads, width + usize::from(log_sums)], of_result);
        let what = format!(
            "{dtype:?}: batch {batch}, {queries} queries, {keys} keys, {heads} heads of {kv_heads}, \
             {dim} and {width} columns, {scale:?}, log sums {log_sums}, {} blocks",
            blocks.len()
        );
        let units = self.of(&[ProductUnits::Plain, ProductUnits::Tensor, ProductUnits::Tensor]);
        let what = format!("{what}, {units:?}");
        let (is_turned, before) = (self.below(2) == 0, self.of(&[0, 0, 1, 4]));
        let what = format!("{what}, heads first {is_turned}, behind {before} elements");
        (Case { inputs, grad, blocks, scale, log_sums, is_turned, before, units }, what)
    }
}

#[test]
fn results_and_gradients_are_those_of_the_host() {
    for seed in 0..24 {
        let mut dice = Dice(seed);
        let dtype = [DType::F32, DType::F16, DType::BF16][seed as usize % 3];
        // Most programs are small: a thread of a device is many times as fast as one here.
        let (widths, most): (&[usize], _) = match seed {
            20.. => (&[65, 100, 128, 200, 256], 40),
            _ => (&[1, 3, 16, 33, 64], 90),
        };
        let (case, what) = dice.case(dtype, widths, most);
        check(&case, dtype, &format!("seed {seed}, {what}"));
    }
}

#[test]
fn a_row_that_is_not_finite_reaches_only_those_that_see_it() {
    for (seed, part) in (0..12).zip([0, 1, 2].into_iter().cycle()) {
        let mut dice = Dice(100 + seed);
        let dtype = [DType::F32, DType::BF16][seed as usize % 2];
        let (mut case, what) = dice.case(dtype, &[5, 17], 50);
        let x = &case.inputs[part];
        let [batch, rows, heads, _] = *x.dims() else { panic!() };
        let place = [dice.below(batch), dice.below(rows), dice.below(heads), dice.below(x.dim(3).unwrap())];
        let value = Tensor::full(dice.of(&[f32::NAN, f32::INFINITY]), (1, 1, 1, 1), &Cpu).unwrap();
        case.inputs[part] = x.slice_assign(&place.map(|at| at..at + 1), &value).unwrap();
        check(&case, dtype, &format!("{what}, input {part} at {place:?} is {value}"));
    }
}

#[test]
fn masks_at_a_distance_need_no_bounds() {
    let sizes = |queries: usize, keys: usize| {
        super::heads::AttentionSizes::of(&[1, queries, 1, 1], &[1, keys, 1, 1], &[1, keys, 1, 1]).unwrap()
    };
    let bounds = |queries: usize, keys: usize, visible: Visible| {
        let block = KeyBlock { rows: 0..keys, visible };
        KeyBounds::new(&[block], &sizes(queries, keys)).bounds.len()
    };
    for (queries, keys) in [(1, 1), (5, 5), (3, 9), (9, 3), (7, 1)] {
        for causal in [false, true] {
            assert_eq!(
                bounds(queries, keys, Visible::plain(queries, keys, causal)),
                0,
                "{queries} {keys} {causal}"
            );
        }
        if queries > keys {
            continue; // a query that sees nothing tells no distance
        }
        let window = (0..queries).map(|i| i.saturating_sub(2).min(keys)..(i + 1).min(keys)).collect();
        assert_eq!(bounds(queries, keys, Visible::new(vec![window])), 0, "{queries} {keys}");
    }
    assert_eq!(bounds(3, 4, Visible::new(vec![vec![0..1, 2..4, 0..0]])), 6);
    assert_eq!(bounds(2, 4, Visible::new(vec![vec![0..1, 0..2]; 2])), 8);
}
