//! Steps by rows against dense ones and against plain loops.

use candle_core::{DType, Device::Cpu, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use candle_shard::sparse::{ParamsAdagrad, ParamsSgd, RowVar, SparseAdagrad, SparseAdamW, SparseSgd};
use candle_shard::{Result, kernels};

use crate::sparse::*;

/// A backward pass through the rows of a table, and through those of a dense copy of it.
fn pass(random: &mut Random, table: &RowVar, dense: &Var, ids: &[u32]) -> Result<Tensor> {
    let weights = random.tensor(&[ids.len(), table.var().dim(1)?], table.var().dtype());
    (table.lookup(ids)?.sqr()? * &weights)?.sum_all()?.backward()?;
    let chosen = dense.index_select(&Tensor::new(ids, &Cpu)?, 0)?;
    let mut grads = (chosen.sqr()? * weights)?.sum_all()?.backward()?;
    Ok(grads.remove(dense).expect("a gradient"))
}

/// Rows from 25 on are never looked up.
const ROWS: usize = 40;
const USED: u32 = 25;

#[test]
fn sgd_and_adagrad_take_the_steps_of_dense_ones() -> Result<()> {
    let mut random = Random::new(6);
    let config = ParamsAdagrad {
        lr: 0.1,
        lr_decay: 0.5,
        initial_accumulator_value: 0.25,
        eps: 1e-3,
        ..Default::default()
    };
    for width in [1, 7, 64] {
        for adagrad in [false, true] {
            let tables = [random.table(ROWS, width, DType::F64), random.table(3, width, DType::F64)];
            let starts = tables.each_ref().map(|table| table.var().copy().unwrap());
            let dense = starts.each_ref().map(|start| Var::from_tensor(start).unwrap());
            let mut sums = starts.each_ref().map(|start| (start.zeros_like().unwrap() + 0.25).unwrap());
            let mut sgd = SparseSgd::new(tables.to_vec(), ParamsSgd { lr: 0.1, ..Default::default() })?;
            let mut ada = SparseAdagrad::new(tables.to_vec(), config.clone())?;
            for step in 0..5 {
                for (i, (len, below)) in [(60, USED), (2, 3)].into_iter().enumerate() {
                    if i == 1 && step == 2 {
                        continue; // no gradient in this step
                    }
                    let ids = random.rows(len, below);
                    let grad = pass(&mut random, &tables[i], &dense[i], &ids)?;
                    let change = if adagrad {
                        sums[i] = (&sums[i] + grad.sqr()?)?;
                        ((grad / (sums[i].sqrt()? + 1e-3)?)? * (0.1 / (1.0 + step as f64 * 0.5)))?
                    } else {
                        (grad * 0.1)?
                    };
                    dense[i].set(&(dense[i].as_detached_tensor() - change)?)?;
                }
                if adagrad {
                    ada.step()?;
                } else {
                    sgd.step()?;
                }
                assert!(
                    tables.iter().all(|table| table.grad().unwrap().is_none()),
                    "a step takes the gradient"
                );
            }
            for ((table, dense), start) in tables.iter().zip(&dense).zip(&starts) {
                assert_close(table.var(), dense, 1e-12, &format!("width {width}, adagrad {adagrad}"));
                let (rows, unused) = (start.dim(0)?, ROWS - USED as usize);
                if rows == ROWS {
                    let tail = |t: &Tensor| bits(&t.narrow(0, USED as usize, unused).unwrap());
                    assert_eq!(tail(table.var()), tail(start));
                }
            }
            let state = ada.state();
            let names: Vec<&str> = state.iter().map(|(name, _)| &name[..]).collect();
            assert_eq!(names, ["adagrad.sum.0", "adagrad.sum.1", "adagrad.steps", "adagrad.options"]);
            if adagrad {
                assert_close(&state[0].1, &sums[0], 1e-12, "sums");
                assert_eq!(state[2].1.to_scalar::<u32>()?, 5);
            }
        }
    }
    Ok(())
}

#[test]
fn adam_w_takes_the_steps_of_the_dense_one_where_every_row_is_looked_up() -> Result<()> {
    let mut random = Random::new(7);
    let params = ParamsAdamW { lr: 0.1, weight_decay: 0.03, ..Default::default() };
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
        let table = random.table(33, 19, dtype);
        let dense = Var::from_tensor(&table.var().copy()?)?;
        let mut ours = SparseAdamW::new(vec![table.clone()], params.clone())?;
        let mut theirs = kernels::AdamW::new(vec![dense.clone()], params.clone())?;
        for _ in 0..5 {
            let ids = [(0..33).collect(), random.rows(20, 33)].concat();
            let weights = random.tensor(&[ids.len(), 19], dtype);
            (table.lookup(&ids[..])?.sqr()? * &weights)?.sum_all()?.backward()?;
            let chosen = dense.index_select(&Tensor::new(&ids[..], &Cpu)?, 0)?;
            theirs.backward_step(&(chosen.sqr()? * weights)?.sum_all()?)?;
            ours.step()?;
        }
        assert_close(table.var(), &dense, tolerance, &format!("{dtype:?}"));
    }
    Ok(())
}

#[test]
fn adam_w_leaves_rows_without_a_gradient_alone() -> Result<()> {
    let mut random = Random::new(8);
    let ParamsAdamW { beta1, beta2, eps, .. } = ParamsAdamW::default();
    let params = ParamsAdamW { lr: 0.05, weight_decay: 0.1, ..Default::default() };
    let (width, table) = (6, random.table(ROWS, 6, DType::F64));
    let dense = Var::from_tensor(&table.var().copy()?)?;
    let mut optimizer = SparseAdamW::new(vec![table.clone()], params)?;
    let [mut want, mut first, mut second] =
        [numbers(&dense), vec![0.0; ROWS * width], vec![0.0; ROWS * width]];
    for step in 1..=6 {
        let ids = random.rows(9, USED);
        let grad = numbers(&pass(&mut random, &table, &dense, &ids)?);
        for i in (0..want.len()).filter(|i| ids.contains(&((i / width) as u32))) {
            first[i] = beta1 * first[i] + (1.0 - beta1) * grad[i];
            second[i] = beta2 * second[i] + (1.0 - beta2) * grad[i] * grad[i];
            let (m, v) = (first[i] / (1.0 - beta1.powi(step)), second[i] / (1.0 - beta2.powi(step)));
            want[i] = want[i] * (1.0 - 0.05 * 0.1) - 0.05 * m / (v.sqrt() + eps);
        }
        dense.set(&Tensor::from_slice(&want, (ROWS, width), &Cpu)?)?;
        let before = table.var().copy()?;
        optimizer.step()?;
        assert_close(table.var(), &dense, 1e-12, "the table");
        for row in (0..ROWS).filter(|&row| !ids.contains(&(row as u32))) {
            assert_eq!(bits(&table.var().get(row)?), bits(&before.get(row)?), "row {row}");
        }
    }
    let state = optimizer.state();
    assert_close(&state[0].1.flatten_all()?, &Tensor::new(first, &Cpu)?, 1e-12, "the first moment");
    assert_close(&state[1].1.flatten_all()?, &Tensor::new(second, &Cpu)?, 1e-12, "the second moment");
    // A step without any gradient changes nothing but the count.
    let before = bits(table.var());
    optimizer.step()?;
    assert_eq!((bits(table.var()), state[2].1.to_scalar::<u32>()?), (before, 7));
    Ok(())
}

#[test]
fn tables_of_16_bits_are_updated_in_f32() -> Result<()> {
    let mut random = Random::new(9);
    for dtype in [DType::F16, DType::BF16] {
        let (width, table) = (5, random.table(ROWS, 5, dtype));
        let round = |x: f32| numbers(&Tensor::new(x, &Cpu).unwrap().to_dtype(dtype).unwrap())[0] as f32;
        let params = ParamsAdagrad { lr: 0.1, ..Default::default() };
        let mut optimizer = SparseAdagrad::new(vec![table.clone()], params)?;
        let mut want: Vec<f32> = numbers(table.var()).into_iter().map(|x| x as f32).collect();
        let mut sums = vec![0f32; want.len()];
        for _ in 0..4 {
            let ids = random.rows(50, USED);
            let weights = random.tensor(&[50, width], dtype);
            (table.lookup(&ids[..])? * &weights)?.sum_all()?.backward()?;
            let weights = numbers(&weights);
            for i in (0..want.len()).filter(|i| ids.contains(&((i / width) as u32))) {
                let of_row = (0..50).filter(|&entry| ids[entry] as usize == i / width);
                let grad = round(of_row.map(|entry| weights[entry * width + i % width] as f32).sum());
                sums[i] += grad * grad;
                want[i] = round(want[i] - grad / (sums[i].sqrt() + 1e-10) * 0.1);
            }
            optimizer.step()?;
        }
        assert_eq!(numbers(table.var()), want.into_iter().map(f64::from).collect::<Vec<_>>(), "{dtype:?}");
        assert_eq!(optimizer.state()[0].1.dtype(), DType::F32);
        assert_eq!(numbers(&optimizer.state()[0].1), sums.into_iter().map(f64::from).collect::<Vec<_>>());
    }
    Ok(())
}

#[test]
fn a_saved_state_goes_on_with_the_same_bits() -> Result<()> {
    let params = ParamsAdamW { lr: 0.1, ..Default::default() };
    let run = |interrupted: bool| -> Result<Vec<u64>> {
        let mut random = Random::new(10);
        let table = random.table(ROWS, 4, DType::F32);
        let mut optimizer = SparseAdamW::new(vec![table.clone()], params.clone())?;
        for step in 0..6 {
            table.lookup(random.rows(9, USED))?.sqr()?.sum_all()?.backward()?;
            if interrupted && step == 3 {
                let saved = optimizer.state();
                // With options that the saved ones replace.
                optimizer = SparseAdamW::new(
                    vec![table.clone()],
                    ParamsAdamW { lr: 0.7, beta1: 0.1, ..params.clone() },
                )?;
                for ((name, var), (saved_name, saved)) in optimizer.state().iter().zip(&saved) {
                    assert_eq!(name, saved_name);
                    var.set(saved)?;
                }
            }
            optimizer.step()?;
        }
        Ok(bits(table.var()))
    };
    assert_eq!(run(true)?, run(false)?);
    Ok(())
}

#[test]
fn tables_without_elements_have_nothing_to_move() -> Result<()> {
    for dims in [[0, 3], [4, 0], [0, 0]] {
        let table = RowVar::new(Var::zeros(&dims[..], DType::F32, &Cpu)?)?;
        let rows: &[u32] = if dims[0] > 0 { &[3, 1, 3] } else { &[] };
        let mut optimizer = SparseAdamW::new(vec![table.clone()], ParamsAdamW::default())?;
        table.lookup(rows)?.backward()?;
        optimizer.step()?;
        assert!(table.grad()?.is_none());
    }
    Ok(())
}

#[test]
fn not_a_number_spreads_no_further_than_its_row() -> Result<()> {
    let table = Random::new(11).table(4, 3, DType::F32);
    let before = bits(table.var());
    let mut optimizer = SparseAdagrad::new(vec![table.clone()], ParamsAdagrad::default())?;
    (table.lookup([2])? * f64::NAN)?.sum_all()?.backward()?;
    optimizer.step()?;
    let after = table.var().to_vec2::<f32>()?;
    assert!(after[2].iter().all(|x| x.is_nan()));
    let others = |bits: &[u64]| [&bits[..6], &bits[9..]].concat();
    assert_eq!(others(&bits(table.var())), others(&before));
    Ok(())
}

#[test]
fn parameters_that_mean_nothing_are_refused() -> Result<()> {
    let adam = ParamsAdamW::default();
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        let ada = ParamsAdagrad::default();
        let mut live = [
            SparseSgd::new(vec![], ParamsSgd::default())?.set_learning_rate(wrong),
            SparseAdagrad::new(vec![], ada.clone())?.set_learning_rate(wrong),
            SparseAdamW::new(vec![], adam.clone())?.set_learning_rate(wrong),
            SparseSgd::new(vec![], ParamsSgd { lr: wrong, ..Default::default() }).map(drop),
            SparseAdagrad::new(vec![], ParamsAdagrad { lr: wrong, ..ada.clone() }).map(drop),
            SparseAdamW::new(vec![], ParamsAdamW { lr: wrong, ..adam.clone() }).map(drop),
        ]
        .map(|result| result.expect_err("refused").to_string());
        live.sort();
        assert!(live.iter().all(|message| message.contains(&format!("lr is {wrong}"))), "{live:?}");
        for (name, result) in [
            ("eps", SparseAdagrad::new(vec![], ParamsAdagrad { eps: wrong, ..ada.clone() }).map(drop)),
            (
                "lr_decay",
                SparseAdagrad::new(vec![], ParamsAdagrad { lr_decay: wrong, ..ada.clone() }).map(drop),
            ),
            (
                "initial",
                SparseAdagrad::new(vec![], ParamsAdagrad { initial_accumulator_value: wrong, ..ada })
                    .map(drop),
            ),
            ("eps", SparseAdamW::new(vec![], ParamsAdamW { eps: wrong, ..adam.clone() }).map(drop)),
            (
                "weight_decay",
                SparseAdamW::new(vec![], ParamsAdamW { weight_decay: wrong, ..adam.clone() }).map(drop),
            ),
        ] {
            let message = result.expect_err("refused").to_string();
            assert!(message.contains(name), "{message}");
        }
    }
    for (beta1, beta2, name) in [(1.0, 0.9, "beta1"), (0.9, 1.5, "beta2"), (f64::NAN, 0.9, "beta1")] {
        let message =
            SparseAdamW::new(vec![], ParamsAdamW { beta1, beta2, ..adam.clone() }).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
    }
    let mut sgd = SparseSgd::new(vec![], ParamsSgd::default())?;
    sgd.set_learning_rate(0.5)?;
    assert_eq!(sgd.learning_rate()?, 0.5);
    // What is loaded is judged like what is given.
    let numbers = &sgd.state()[0].1;
    numbers.set(&Tensor::new(&[0.5f64, 0.9, 0.0, 0.0, 0.0], &Cpu)?)?;
    for message in [sgd.step().unwrap_err(), sgd.learning_rate().unwrap_err()] {
        assert!(message.to_string().contains("momentum is 0.9"), "{message}");
    }
    Ok(())
}

#[test]
fn what_concerns_rows_without_a_gradient_is_refused() {
    let decay = SparseSgd::new(vec![], ParamsSgd { weight_decay: 0.1, ..Default::default() }).map(drop);
    let momentum = SparseSgd::new(vec![], ParamsSgd { momentum: 0.9, ..Default::default() }).map(drop);
    let adagrad =
        SparseAdagrad::new(vec![], ParamsAdagrad { weight_decay: 0.1, ..Default::default() }).map(drop);
    for (result, words) in [
        (decay, ["Sgd", "weight_decay is 0.1"]),
        (momentum, ["Sgd", "momentum is 0.9"]),
        (adagrad, ["Adagrad", "weight_decay is 0.1"]),
    ] {
        let message = result.unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
}
