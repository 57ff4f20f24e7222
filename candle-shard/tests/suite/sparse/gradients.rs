//! Lookups and the gradients that they collect.

use candle_core::{CpuStorage, CustomOp1, DType, Device::Cpu, Layout, Shape, Tensor, Var};
use candle_shard::sparse::{ParamsSgd, RowGrad, RowVar, SparseSgd};
use candle_shard::{DTensor, Replicate, Result};
use proptest::prelude::*;
use test_utils::on_ranks;

use crate::sparse::*;

#[test]
fn lookups_are_those_of_index_select() -> Result<()> {
    let mut random = Random::new(1);
    for dtype in DTYPES {
        for (rows, width) in [(1, 1), (7, 3), (40, 16), (300, 33), (5, 0)] {
            let table = random.table(rows, width, dtype);
            for ids in
                [vec![], vec![0], vec![0; 5], random.rows(6, rows as u32), random.rows(500, rows as u32)]
            {
                let what = format!("{dtype:?} [{rows}, {width}], {} ids", ids.len());
                let found = table.lookup(ids.clone())?;
                assert_eq!((found.dims(), found.dtype()), (&[ids.len(), width][..], dtype), "{what}");
                assert!(found.track_op(), "{what} has left the graph");
                if found.elem_count() == 0 {
                    continue; // candle's binary ops leave the graph here
                }
                let weights = random.tensor(found.dims(), dtype);
                (found.sqr()? * &weights)?.sum_all()?.backward()?;
                let grad = table.take_grad()?.expect("a gradient");
                let dense = Var::from_tensor(&table.var().to_dtype(DType::F64)?)?;
                let chosen = dense.index_select(&Tensor::new(&ids[..], &Cpu)?, 0)?;
                assert_eq!(bits(&found), bits(&chosen), "{what}");
                let grads = (chosen.sqr()? * weights.to_dtype(DType::F64)?)?.sum_all()?.backward()?;
                assert!(grad.rows().is_sorted_by(|a, b| a < b), "{what}");
                assert!(
                    ids.iter().all(|id| grad.rows().contains(id))
                        && grad.rows().iter().all(|row| ids.contains(row))
                );
                assert_close(&grad.to_dense(rows)?, grads.get(&dense).unwrap(), tolerance(dtype), &what);
            }
        }
    }
    Ok(())
}

#[test]
fn backward_passes_add_up_until_the_gradient_is_taken() -> Result<()> {
    let table = Random::new(2).table(9, 2, DType::F64);
    assert!(table.grad()?.is_none());
    let pass = |rows: &[u32], factor: f64| -> Result<()> {
        (table.lookup(rows)?.sum_all()? * factor)?.backward()?;
        Ok(())
    };
    let all = |grad: RowGrad| -> Result<_> { Ok((grad.rows().to_vec(), grad.values().to_vec2::<f64>()?)) };
    let now = || table.grad()?.map(all).transpose();
    pass(&[4, 1], 1.0)?;
    pass(&[1, 8, 1], 10.0)?;
    let want = (vec![1, 4, 8], vec![vec![21.0; 2], vec![1.0; 2], vec![10.0; 2]]);
    assert_eq!(now()?, Some(want.clone()));
    assert_eq!(now()?, Some(want.clone()), "a look changes nothing");
    assert_eq!(table.clone().take_grad()?.map(all).transpose()?, Some(want), "a clone is the same variable");
    assert!(now()?.is_none());
    // Two lookups in one graph, one of them with a gradient of zero, and one that no backward pass reaches.
    let (a, b, _idle) = (table.lookup([3])?, table.lookup([3, 5])?, table.lookup([0])?);
    (a.sum_all()? + (b * 0.5)?.narrow(0, 0, 1)?.sum_all()?)?.backward()?;
    assert_eq!(now()?, Some((vec![3, 5], vec![vec![1.5; 2], vec![0.0; 2]])));
    table.zero_grad();
    assert!(now()?.is_none());
    // A lookup without rows.
    table.lookup([])?.backward()?;
    assert_eq!(now()?, Some((vec![], vec![])));
    Ok(())
}

#[test]
fn gradients_are_clipped_and_put_back() -> Result<()> {
    let mut random = Random::new(3);
    for dtype in DTYPES {
        let table = random.table(20, 5, dtype);
        table.lookup(random.rows(30, 20))?.sqr()?.sum_all()?.backward()?;
        let grad = table.take_grad()?.expect("a gradient");
        let norm = numbers(grad.values()).iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!((grad.norm()? / norm - 1.0).abs() < 1e-12);
        table.add_grad(grad.scale(0.25)?)?;
        table.add_grad(grad.scale(0.25)?)?;
        let half = table.grad()?.expect("a gradient");
        assert_eq!((half.rows(), numbers(half.values())), (grad.rows(), numbers(grad.scale(0.5)?.values())));
        assert_eq!(bits(&half.to_dense(20)?), bits(&(grad.to_dense(20)? * 0.5)?));
    }
    let nothing = RowGrad::new([], &Tensor::zeros((0, 3), DType::F32, &Cpu)?)?;
    assert_eq!((nothing.norm()?, nothing.scale(2.0)?.rows().len()), (0.0, 0));
    assert_eq!(numbers(&nothing.to_dense(2)?), [0.0; 6]);
    Ok(())
}

#[test]
fn recomputed_parts_collect_the_same_gradient() {
    on_ranks(1, "recomputed", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 1)])?;
        let table = Random::new(4).table(6, 2, DType::F64);
        let (x, var) = DTensor::distribute(&Random::new(5).tensor(&[3, 2], DType::F64), &mesh, &[Replicate])?
            .to_var()?;
        let part = |table: RowVar| {
            move |x: &DTensor| -> Result<DTensor> {
                let found = DTensor::from_local(table.lookup([5, 0, 5])?, x.mesh(), &[Replicate], (3, 2))?;
                x.mul(&found)?.sqr()
            }
        };
        let plain = part(table.clone())(&x)?.sum_all()?.backward()?;
        let want = table.take_grad()?.expect("a gradient");
        let recomputed = candle_shard::nn::recompute(&x, part(table.clone()))?.sum_all()?.backward()?;
        let got = table.take_grad()?.expect("a gradient");
        assert_eq!((got.rows(), bits(got.values())), (&[0, 5][..], bits(want.values())));
        assert_eq!(bits(recomputed.get(&var).unwrap()), bits(plain.get(&var).unwrap()));
        Ok(())
    });
}

/// Returns the table itself as the gradient.
struct GivesTable(Tensor);

impl CustomOp1 for GivesTable {
    fn name(&self) -> &'static str {
        "gives_table"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

#[test]
fn a_gradient_may_lie_in_the_memory_of_its_table() -> Result<()> {
    let table = RowVar::new(Var::new(&[[1f32, 2.], [4., 8.]], &Cpu)?)?;
    let grad = table.var().as_detached_tensor();
    table.lookup([1, 0])?.apply_op1(GivesTable(grad))?.backward()?;
    SparseSgd::new(vec![table.clone()], ParamsSgd { lr: 0.5, ..Default::default() })?.step()?;
    assert_eq!(table.var().to_vec2::<f32>()?, [[-1., -2.], [3.5, 7.]]);
    Ok(())
}

#[test]
fn misuse_is_an_error_that_names_it() -> Result<()> {
    let tensor = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Cpu);
    let table = RowVar::new(Var::zeros((4, 2), DType::F32, &Cpu)?)?;
    let grad = |rows: &[u32], dims: &[usize], dtype| RowGrad::new(rows, &tensor(dims, dtype)?);
    let (one, far, wide, double) = (
        grad(&[3], &[1, 2], DType::F32)?,
        grad(&[4], &[1, 2], DType::F32)?,
        grad(&[0], &[1, 3], DType::F32)?,
        grad(&[0], &[1, 2], DType::F64)?,
    );
    let row_var = |dims: &[usize], dtype| RowVar::new(Var::zeros(dims, dtype, &Cpu)?).map(drop);
    let cases: Vec<(Result<()>, &[&str])> = vec![
        (row_var(&[4], DType::F32), &["RowVar", "[4]", "[rows, width]"]),
        (row_var(&[4, 2], DType::U32), &["RowVar", "U32", "bf16"]),
        (table.lookup([0, 4, 9]).map(drop), &["lookup", "row 4", "[4, 2]"]),
        (table.renorm(&[7], 1.0, 2.0), &["max_norm", "row 7", "[4, 2]"]),
        (table.renorm(&[0], 0.0, 2.0), &["renorm", "max_norm 0"]),
        (table.renorm(&[0], f64::NAN, 2.0), &["renorm", "max_norm NaN"]),
        (table.renorm(&[0], 1.0, f64::NAN), &["renorm", "norm_type NaN"]),
        (grad(&[0, 1], &[1, 2], DType::F32).map(drop), &["RowGrad", "[1, 2]", "2 rows"]),
        (grad(&[0], &[1], DType::F32).map(drop), &["RowGrad", "[1]", "1 rows"]),
        (grad(&[0], &[1, 2], DType::I64).map(drop), &["RowGrad", "I64"]),
        (one.to_dense(3).map(drop), &["to_dense", "row 3", "3 rows"]),
        (table.add_grad(far), &["add_grad", "row 4", "[4, 2]"]),
        (table.add_grad(wide), &["add_grad", "[1, 3]", "[4, 2]"]),
        (table.add_grad(double), &["add_grad", "F64", "F32"]),
    ];
    for (i, (result, words)) in cases.into_iter().enumerate() {
        let message = result.expect_err(&format!("case {i} fails")).to_string();
        for word in words {
            assert!(message.contains(word), "case {i}: {word:?} is not in {message:?}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rows_are_merged_in_the_order_of_the_list(
        rows in prop::collection::vec(prop_oneof![3 => 0u32..12, 1 => 0u32..9_000_000], 0..120),
        width in 0usize..20,
        seed in any::<u64>(),
    ) {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let values = Random::new(seed).tensor(&[rows.len(), width], dtype);
            let merged = RowGrad::new(&rows[..], &values).unwrap();
            // The first as it is, then one after the other, rounded like the kernel.
            let mut want = std::collections::BTreeMap::<u32, Vec<f64>>::new();
            let round = |x: f64| if dtype == DType::F64 { x } else { x as f32 as f64 };
            for (i, &row) in rows.iter().enumerate() {
                let entry = numbers(&values.get(i).unwrap());
                want.entry(row)
                    .and_modify(|sum| sum.iter_mut().zip(&entry).for_each(|(sum, x)| *sum = round(*sum + x)))
                    .or_insert(entry);
            }
            prop_assert!(merged.rows().iter().eq(want.keys()));
            let flat = Tensor::from_iter(want.into_values().flatten(), &Cpu).unwrap().to_dtype(dtype).unwrap();
            prop_assert_eq!(bits(merged.values()), bits(&flat));
        }
    }

    #[test]
    fn two_backward_passes_give_the_bits_of_one_over_both_lists(
        rows in prop::collection::vec(0u32..12, 2..120),
        width in 1usize..20,
        cut in 1usize..119,
        seed in any::<u64>(),
    ) {
        let cut = cut.min(rows.len() - 1);
        for dtype in DTYPES {
            let values = Random::new(seed).tensor(&[rows.len(), width], dtype);
            let table = Random::new(seed).table(12, width, dtype);
            for part in [0..cut, cut..rows.len()] {
                let weights = values.narrow(0, part.start, part.len()).unwrap();
                let found = table.lookup(&rows[part]).unwrap();
                (found * weights).unwrap().sum_all().unwrap().backward().unwrap();
            }
            let (got, want) = (table.grad().unwrap().unwrap(), RowGrad::new(&rows[..], &values).unwrap());
            prop_assert_eq!(got.rows(), want.rows());
            prop_assert_eq!(bits(got.values()), bits(want.values()));
        }
    }
}
