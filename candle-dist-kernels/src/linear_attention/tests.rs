use std::sync::Arc;

use candle_core::{DType, Result, Tensor, Var, bail};

use super::inputs::ScanInputs;
use super::{composed, gated_delta_rule, state_space_scan};
use crate::waves::waves;

/// The first element begins anew at its fourth token, the second one at its second.
const HISTORY: [u32; 14] = [0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5];

/// A scan of inputs from a state, with a history.
type Scan = fn(&[Tensor], Option<&Tensor>, Option<Arc<[u32]>>) -> Result<(Tensor, Tensor)>;

fn inputs<'a>(
    x: &'a [Tensor],
    gates: &'a [&'a Tensor],
    state: Option<&'a Tensor>,
    history: Option<Arc<[u32]>>,
) -> ScanInputs<'a> {
    ScanInputs { q: &x[0], k: &x[1], v: &x[2], gates, state, history }
}

const DELTA: [Scan; 2] = [
    |x, state, history| gated_delta_rule([&x[0], &x[1], &x[2]], [&x[3], &x[4]], state, history),
    |x, state, history| {
        let gates = [&x[3], &x[4]];
        let inputs = inputs(x, &gates, state, history);
        let (sizes, state) = inputs.checked("delta")?;
        composed::delta_rule(&inputs, state.as_ref(), sizes)
    },
];

/// The decay of a state is none of those that grow.
const STATE_SPACE: [Scan; 2] = [
    |x, state, history| state_space_scan([&x[0], &x[1], &x[2]], &x[3].sqr()?.neg()?, state, history),
    |x, state, history| {
        let g = x[3].sqr()?.neg()?;
        let gates = [&g];
        let inputs = inputs(x, &gates, state, history);
        let (sizes, state) = inputs.checked("state space")?;
        composed::state_space(&inputs, state.as_ref(), sizes)
    },
];

/// Inputs of two elements with 3 heads, whose keys are 4 wide, and that have 2 values 5 wide.
fn vars(tokens: usize, gates: usize) -> Result<Vec<Var>> {
    let sizes = [4, 4, 10].into_iter().chain(std::iter::repeat_n(2, gates));
    let var = |(i, size): (usize, usize)| {
        let values = waves(&[2, tokens, 3, size], DType::F64);
        Var::from_tensor(&(values.as_tensor() * (0.3 + 0.1 * i as f64))?)
    };
    sizes.enumerate().map(var).collect()
}

fn far(a: &Tensor, b: &Tensor) -> Result<f64> {
    (a - b)?.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar()
}

fn assert_composed([fused, plain]: [Scan; 2], vars: &[Var], histories: &[Option<Arc<[u32]>>]) -> Result<()> {
    let x: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let first = (waves(&[2, 4, 3, 10], DType::F64).as_tensor() * 0.7)?;
    for state in [None, Some(&first)] {
        for history in histories {
            let (fused, plain) = (fused(&x, state, history.clone())?, plain(&x, state, history.clone())?);
            assert!(far(&fused.0, &plain.0)? < 1e-12 && far(&fused.1, &plain.1)? < 1e-12);
            let grads = |y: &Tensor| (y * (y + 1.0)?)?.sum_all()?.backward();
            let (fused, plain) = (grads(&fused.0)?, grads(&plain.0)?);
            for (i, var) in vars.iter().enumerate() {
                let (Some(got), Some(want)) = (fused.get(var), plain.get(var)) else { bail!("no gradient") };
                let far = far(got, want)?;
                assert!(far < 1e-11, "input {i}: {far}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_composed_form_equals_the_fused_one() -> Result<()> {
    let histories = [None, Some(Arc::from(&HISTORY[..]))];
    assert_composed(DELTA, &vars(7, 2)?, &histories)?;
    assert_composed(STATE_SPACE, &vars(7, 1)?, &histories)
}

#[test]
fn chunks_of_a_long_text_reach_into_each_other() -> Result<()> {
    // Documents that begin within chunks and with one, and one that is longer than a chunk.
    let begins = |element: usize, token: usize| match element {
        0 => [0, 64, 70].contains(&token),
        _ => [3, 140].contains(&token),
    };
    let mut history = Vec::new();
    for element in 0..2 {
        let mut before = 5;
        for token in 0..150 {
            before = if begins(element, token) { 0 } else { before + 1 };
            history.push(before);
        }
    }
    assert_composed(STATE_SPACE, &vars(150, 1)?, &[None, Some(history.into())])
}

#[test]
fn a_text_in_two_parts_is_the_text() -> Result<()> {
    for ([scan, _], gates) in [(DELTA, 2), (STATE_SPACE, 1)] {
        let all = vars(9, gates)?;
        let run = |start: usize, tokens: usize, state: Option<&Tensor>| {
            let part = |x: &Var| x.narrow(1, start, tokens)?.to_dtype(DType::F32);
            scan(&all.iter().map(part).collect::<Result<Vec<_>>>()?, state, None)
        };
        let (whole, last) = run(0, 9, None)?;
        let (first, state) = run(0, 5, None)?;
        let (second, end) = run(5, 4, Some(&state))?;
        assert_eq!(far(&whole, &Tensor::cat(&[first, second], 1)?)?, 0.0);
        assert_eq!(far(&last, &end)?, 0.0);
    }
    Ok(())
}

#[test]
fn inputs_that_do_not_fit_are_refused() -> Result<()> {
    let of = |shape: &[usize]| waves(shape, DType::F32);
    let run = |g: &[usize], state: Option<&[usize]>, history: Option<Arc<[u32]>>| {
        let state = state.map(of);
        let state = state.as_ref().map(|state| state.as_tensor());
        let c = of(&[1, 3, 2, 4]);
        state_space_scan([&c, &c, &of(&[1, 3, 2, 6])], &of(g), state, history)
    };
    assert_eq!(run(&[1, 3, 2, 2], Some(&[1, 4, 2, 6]), Some([0, 1, 2].into()))?.0.dims(), [1, 3, 2, 6]);
    assert!(run(&[1, 3, 2, 4], None, None).is_err());
    assert!(run(&[1, 3, 1, 2], None, None).is_err());
    assert!(run(&[1, 3, 2, 2], Some(&[1, 2, 4, 6]), None).is_err());
    assert!(run(&[1, 3, 2, 2], None, Some([0, 1].into())).is_err());
    Ok(())
}
