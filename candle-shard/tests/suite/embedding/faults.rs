//! The faults of PyTorch's sharded embeddings, one test each: none of them here.
use crate::embedding::check::{check, distribute, layouts, vector};
use crate::embedding::oracle::{Call, Case, Op, norm};
use candle_core::{DType, Device, Tensor};
use candle_dist::{ProcessGroup, comm};
use candle_shard::kernels::BagMode;
use candle_shard::{ChunkShardingSpec, EmbeddingBagOptions, EmbeddingOptions, Result, ShardedTensor};
use test_utils::{device, on_ranks};

fn limit(max_norm: f64, norm_type: f64) -> EmbeddingOptions {
    EmbeddingOptions::default().max_norm(max_norm).norm_type(norm_type)
}

fn padding(padding_idx: i64) -> EmbeddingOptions {
    EmbeddingOptions::default().padding_idx(padding_idx)
}

fn bag(mode: BagMode, lookup: EmbeddingOptions) -> Op {
    Op::Bag(EmbeddingBagOptions::default().mode(mode).lookup(lookup))
}

/// A table of 16 rows, from a wave.
fn case(op: Op, calls: Vec<Call>) -> Case {
    let table = (0..16 * 6).map(|i| 3.0 * (i as f64).sin()).collect();
    Case { rows: 16, width: 6, table, op, calls }
}

/// Checks the case in every layout.
fn everywhere(label: &str, case: Case) {
    let world = case.calls.len();
    on_ranks(world, label, move |ctx| -> Result<()> {
        let expected = case.on_one_device();
        layouts(world).iter().try_for_each(|layout| check(&case, layout, ctx.group(), &expected))
    });
}

fn bagged(ids: &[i64], offsets: &[i64]) -> Call {
    Call { offsets: Some(offsets.to_vec()), ..Call::new(ids.to_vec(), &[ids.len()]) }
}

/// `[rows, width]` in pieces of `dim`.
fn sharded(table: &Tensor, dim: isize, group: &ProcessGroup) -> Result<ShardedTensor> {
    distribute(table, ChunkShardingSpec::on_ranks(dim, 0..group.size())?, group)
}

#[test]
fn fault_a_the_last_row_is_limited_when_all_ids_are_of_one_rank() {
    let calls = (0..4).map(|_| Call::new(vec![0, 1, 2, 3], &[4])).collect();
    everywhere("fault a", case(Op::Embedding(limit(0.5, 2.0)), calls));
}

#[test]
fn fault_b_columns_are_limited_as_on_one_device_by_every_norm() {
    for p in [1.0, 2.0, f64::INFINITY] {
        let calls = (0..3).map(|rank| Call::new(vec![rank, 5, 15], &[3])).collect();
        everywhere("fault b", case(Op::Embedding(limit(1.0, p)), calls));
    }
    // The small number in the divisor, which PyTorch's columns lack.
    on_ranks(2, "fault b", |ctx| -> Result<()> {
        let whole = Tensor::new(&[[3f64, 4.]], &Device::Cpu)?;
        let found = sharded(&whole, 1, ctx.group())?.embedding(&vector(&[0u32])?, &limit(1.0, 2.0))?;
        assert_eq!(found.to_vec2::<f64>()?, [[3.0 * (1.0 / (5.0 + 1e-7)), 4.0 * (1.0 / (5.0 + 1e-7))]]);
        Ok(())
    });
}

#[test]
fn fault_c_the_parameter_stays_the_same_and_bytes_follow_the_ids() {
    for dim in [0, 1] {
        let sent = [100usize, 100_000].map(|rows| {
            let bytes = on_ranks(2, "fault c", move |ctx| -> Result<usize> {
                let whole = Tensor::ones((rows, 4), DType::F32, &Device::Cpu)?;
                let (table, vars) = sharded(&whole, dim, ctx.group())?.to_var()?;
                let ids = vector(&[1u32, rows as u32 - 1, 1])?;
                let (found, counts) = comm::record(|| table.embedding(&ids, &limit(0.5, 2.0)));
                let grads = found?.sum_all()?.backward()?;
                // The variable has the gradient, and the limited rows.
                assert!(grads.get(&vars[0]).is_some());
                let row = if ctx.rank() == 1 && dim == 0 { rows / 2 - 1 } else { 1 };
                let held = vars[0].get(row)?.to_vec1::<f32>()?;
                assert!(held.iter().all(|&x| (x - 0.25).abs() < 1e-6), "{held:?}");
                assert_eq!(counts.total(), if dim == 0 { 3 } else { 4 });
                Ok(counts.total_bytes())
            });
            bytes.iter().sum::<usize>()
        });
        assert_eq!(sent[0], sent[1], "dim {dim}");
    }
}

#[test]
fn fault_d_weights_leave_large_ids_as_they_are() {
    on_ranks(2, "fault d", |ctx| -> Result<()> {
        let (rows, odd) = ((1 << 24) + 4, (1 << 24) + 1);
        let group = ctx.group();
        let table = ShardedTensor::zeros(
            ChunkShardingSpec::on_ranks(0, 0..2)?,
            (rows, 1),
            DType::F32,
            &Device::Cpu,
            group,
        )?;
        let table = table.to_device(group.device())?;
        let (table, vars) = table.to_var()?;
        if ctx.rank() == 1 {
            let five = Tensor::new(&[[5f32]], &device())?;
            vars[0].slice_set(&five, 0, odd - rows / 2)?;
        }
        let ids = Tensor::new(&[[odd as i64, odd as i64 + 1]], &device())?;
        let weights = Tensor::new(&[[3f32, 7.]], &device())?;
        let options = EmbeddingBagOptions::default().mode(BagMode::Sum);
        let found = table.embedding_bag(&ids, None, Some(&weights), &options)?;
        assert_eq!(found.to_vec2::<f32>()?, [[15.0]]);
        Ok(())
    });
}

#[test]
fn fault_e_there_may_be_more_bags_than_ids() {
    for mode in [BagMode::Sum, BagMode::Mean, BagMode::Max] {
        let calls = vec![
            bagged(&[3, 9], &[0, 0, 0, 1, 1, 2, 2, 2, 2]),
            bagged(&[15], &[0, 0]),
            bagged(&[], &[0, 0, 0]),
        ];
        everywhere("fault e", case(bag(mode, EmbeddingOptions::default()), calls));
    }
}

#[test]
fn fault_f_means_count_neither_padding_nor_empty_bags() {
    let calls =
        vec![bagged(&[4, 1, 4, 4, 2], &[0, 2, 4, 4]), bagged(&[4, 4], &[0, 1]), bagged(&[0, 4, 15, 1], &[0])];
    everywhere("fault f", case(bag(BagMode::Mean, padding(4)), calls));
}

#[test]
fn fault_g_negative_padding_counts_from_the_end() {
    for mode in [BagMode::Sum, BagMode::Mean, BagMode::Max] {
        let calls = vec![bagged(&[15, 14, 3], &[0, 1]), bagged(&[14, 13], &[0]), bagged(&[14], &[0])];
        everywhere("fault g", case(bag(mode, padding(-2)), calls));
    }
    let calls = vec![Call::new(vec![14, 1], &[2]), Call::new(vec![14, 14], &[1, 2])];
    everywhere("fault g", case(Op::Embedding(padding(-2)), calls));
}

#[test]
fn fault_h_the_gradient_of_a_maximum_goes_to_one_row() {
    let calls = (0..4).map(|rank| bagged(&[rank, 5, 9, 13, 15, 2, 5], &[0, 3])).collect();
    everywhere("fault h", case(bag(BagMode::Max, EmbeddingOptions::default()), calls));
    on_ranks(4, "fault h", |ctx| -> Result<()> {
        let whole = Tensor::ones((16, 8), DType::F64, &Device::Cpu)?;
        let (table, vars) = sharded(&whole, 0, ctx.group())?.to_var()?;
        let options = EmbeddingBagOptions::default().mode(BagMode::Max);
        let found =
            table.embedding_bag(&vector(&[1u32, 5, 9, 13])?, Some(&vector(&[0u32])?), None, &options)?;
        let grads = found.sum_all()?.backward()?;
        let grad = grads.get(&vars[0]).unwrap().sum_all()?;
        let sum = ctx.group().all_reduce(&grad, candle_dist::ReduceOp::Sum)?.to_scalar::<f64>()?;
        assert_eq!(sum, 32.0); // 4 ranks with one bag of 8 columns each
        Ok(())
    });
}

#[test]
fn fault_i_weights_of_means_are_refused() {
    let errors = on_ranks(2, "fault i", |ctx| -> Result<String> {
        let table = sharded(&Tensor::ones((4, 2), DType::F64, &Device::Cpu)?, 0, ctx.group())?;
        let (ids, weights) = (Tensor::new(&[[0u32, 1]], &device())?, Tensor::new(&[[1f64, 2.]], &device())?);
        let options = EmbeddingBagOptions::default().mode(BagMode::Mean);
        Ok(table.embedding_bag(&ids, None, Some(&weights), &options).unwrap_err().to_string())
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("per_sample_weights in mode Mean"), "{}", errors[0]);
}

#[test]
fn fault_j_subgroups_count_their_own_ranks() {
    on_ranks(5, "fault j", |ctx| -> Result<()> {
        let members = [4, 1, 3];
        if !members.contains(&ctx.rank()) {
            return Ok(());
        }
        let group = ctx.group().subgroup(&members)?;
        for op in [Op::Embedding(limit(1.0, 2.0)), bag(BagMode::Mean, padding(3))] {
            let calls = (0..3).map(|rank| Call::new(vec![rank, 3, 15, 8], &[2, 2])).collect();
            let case = case(op, calls);
            let expected = case.on_one_device();
            layouts(3).iter().try_for_each(|layout| check(&case, layout, &group, &expected))?;
        }
        Ok(())
    });
}

#[test]
fn a_norm_that_equals_the_limit_and_a_row_of_zeros_stay() {
    for dim in [0, 1] {
        on_ranks(2, "edges", move |ctx| -> Result<()> {
            let rows = [[3f64, 4.], [0., 0.], [6., 8.], [30., 40.]];
            let (table, _) = sharded(&Tensor::new(&rows, &Device::Cpu)?, dim, ctx.group())?.to_var()?;
            table.embedding(&vector(&[0u32, 1, 2])?, &limit(5.0, 2.0))?;
            let whole = table.gather_all()?.to_vec2::<f64>()?;
            assert_eq!(
                (&whole[0], &whole[1], &whole[3]),
                (&rows[0].to_vec(), &rows[1].to_vec(), &rows[3].to_vec())
            );
            assert!((norm(&whole[2], 2.0) - 5.0).abs() < 1e-6);
            Ok(())
        });
    }
}

#[test]
fn a_padding_row_is_no_part_of_a_gradient_by_rows() {
    for dim in [0, 1] {
        on_ranks(2, "padding", move |ctx| -> Result<()> {
            let whole = Tensor::ones((6, 4), DType::F64, &Device::Cpu)?;
            let (table, vars) = sharded(&whole, dim, ctx.group())?.to_row_vars()?;
            let bags = EmbeddingBagOptions::default().lookup(padding(-2));
            let ids = vector(&[4u32, 1, 4, 5])?;
            let rows = table.embedding(&ids, &padding(-2))?;
            let bag = table.embedding_bag(&ids.reshape((2, 2))?, None, None, &bags)?;
            (rows.sum_all()? + bag.sum_all()?)?.backward()?;
            let grad = vars[0].take_grad()?.unwrap();
            let want: &[u32] = match (dim, ctx.rank()) {
                (0, 0) => &[1],
                (0, _) => &[2], // row 5
                _ => &[1, 5],
            };
            assert_eq!(grad.rows(), want, "lazy optimizers decay what is in a gradient");
            Ok(())
        });
    }
}

#[test]
fn a_table_that_has_its_dtype_already_keeps_its_row_variables() {
    on_ranks(2, "dtype", |ctx| -> Result<()> {
        let whole = Tensor::ones((6, 4), DType::F64, &Device::Cpu)?;
        let (table, vars) = sharded(&whole, 0, ctx.group())?.to_row_vars()?;
        assert_eq!(table.to_dtype(DType::F64)?.row_vars().len(), vars.len());
        assert!(table.to_dtype(DType::F32)?.row_vars().is_empty(), "its shards are other tensors");
        assert!(table.copy()?.row_vars().is_empty());
        Ok(())
    });
}
