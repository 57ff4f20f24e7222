//! Wrong arguments: one error on all ranks, before anything has changed.
use crate::embedding::check::{distribute, vector};
use candle_core::{DType, Device, Tensor};
use candle_shard::kernels::BagMode;
use candle_shard::sharded_tensor::LocalOp;
use candle_shard::{ChunkShardingSpec, EmbeddingBagOptions, EmbeddingOptions, Result};
use test_utils::{device, on_ranks};

/// What a rank gives.
#[derive(Clone)]
struct Given {
    ids: Tensor,
    offsets: Option<Tensor>,
    weights: Option<Tensor>,
    options: EmbeddingBagOptions,
}

/// Bags that are in order, with a limit that would change every row.
fn right() -> Given {
    let lookup = EmbeddingOptions::default().max_norm(0.1);
    Given {
        ids: vector(&[0i64, 5, 3]).unwrap(),
        offsets: Some(vector(&[0i64, 2]).unwrap()),
        weights: None,
        options: EmbeddingBagOptions::default().mode(BagMode::Sum).lookup(lookup),
    }
}

/// Runs bags (or else rows) where only `who` ranks give something wrong: all ranks get one error with these `parts`.
fn refused(parts: &'static [&'static str], bags: bool, spoil: fn(&mut Given)) {
    for (dim, who) in [(0, 0..3), (0, 1..2), (1, 2..3)] {
        let alone = who.len() == 1;
        let errors = on_ranks(3, "refused", move |ctx| -> Result<String> {
            let spec = ChunkShardingSpec::on_ranks(dim, 0..3)?;
            let whole = Tensor::ones((6, 4), DType::F64, &Device::Cpu)?;
            let (table, _) = distribute(&whole, spec, ctx.group())?.to_var()?;
            let run = |given: &Given| match bags {
                true => table.embedding_bag(
                    &given.ids,
                    given.offsets.as_ref(),
                    given.weights.as_ref(),
                    &given.options,
                ),
                false => table.embedding(&given.ids, &given.options.lookup),
            };
            let mut given = right();
            if who.contains(&ctx.rank()) {
                spoil(&mut given);
            }
            let error = run(&given).expect_err("the arguments are wrong").to_string();
            assert_eq!(
                table.gather_all()?.to_vec2::<f64>()?,
                whole.to_vec2::<f64>()?,
                "the table has changed"
            );
            run(&right())?; // the group goes on
            Ok(error)
        });
        assert!(errors.iter().all(|error| error == &errors[0]), "{errors:?}");
        assert!(parts.iter().all(|part| errors[0].contains(part)), "{} lacks one of {parts:?}", errors[0]);
        assert!(!alone || errors[0].contains("rank"), "{}", errors[0]);
    }
}

#[test]
fn ids() {
    for bags in [false, true] {
        refused(&["id 6", "6 rows", "rank"], bags, |given| given.ids = vector(&[0i64, 6, 3]).unwrap());
        refused(&["id -1", "6 rows"], bags, |given| given.ids = vector(&[0i64, -1, 3]).unwrap());
        refused(&["ids are f32", "u8, u32 or i64"], bags, |given| {
            given.ids = vector(&[0f32, 1., 3.]).unwrap();
        });
    }
}

#[test]
fn limits_and_padding() {
    for bags in [false, true] {
        refused(&["max_norm 0", "larger than zero"], bags, |given| given.options.lookup.max_norm = Some(0.0));
        refused(&["max_norm -1", "larger than zero"], bags, |given| {
            given.options.lookup.max_norm = Some(-1.0);
        });
        refused(&["max_norm NaN"], bags, |given| given.options.lookup.max_norm = Some(f64::NAN));
        refused(&["norm_type is not a number"], bags, |given| given.options.lookup.norm_type = f64::NAN);
        refused(&["padding_idx 6", "-6 to 5"], bags, |given| given.options.lookup.padding_idx = Some(6));
        refused(&["padding_idx -7", "-6 to 5"], bags, |given| given.options.lookup.padding_idx = Some(-7));
        refused(&["padding_idx"], bags, |given| given.options.lookup.padding_idx = Some(i64::MIN));
    }
}

#[test]
fn bags() {
    fn offsets(given: &mut Given, offsets: &[i64]) {
        given.offsets = Some(vector(offsets).unwrap());
    }
    refused(&["need offsets"], true, |given| given.offsets = None);
    refused(&["offsets must rise"], true, |given| offsets(given, &[0, 2, 1]));
    refused(&["bag 1 begins at 4", "3 ids"], true, |given| offsets(given, &[0, 4]));
    refused(&["begins at 1", "must begin at 0"], true, |given| offsets(given, &[1, 2]));
    refused(&["begins at -1"], true, |given| offsets(given, &[-1, 2]));
    refused(&["the last offset must be the number of ids, 3"], true, |given| {
        given.options.include_last_offset = true;
    });
    refused(&["offsets f32[2]"], true, |given| given.offsets = Some(vector(&[0f32, 1.]).unwrap()));
    refused(&["bags already"], true, |given| given.ids = given.ids.reshape((1, 3)).unwrap());
    refused(&["ids [1, 3, 1]"], true, |given| {
        (given.ids, given.offsets) = (given.ids.reshape((1, 3, 1)).unwrap(), None);
    });
    refused(&["include_last_offset needs offsets"], true, |given| {
        (given.ids, given.offsets) = (given.ids.reshape((1, 3)).unwrap(), None);
        given.options.include_last_offset = true;
    });
}

#[test]
fn weights() {
    fn weigh(given: &mut Given, weights: Tensor) {
        given.weights = Some(weights);
    }
    refused(&["per_sample_weights", "[2]", "[3]"], true, |given| weigh(given, vector(&[1f64, 2.]).unwrap()));
    refused(&["per_sample_weights f32", "f64"], true, |given| weigh(given, vector(&[1f32, 2., 3.]).unwrap()));
    refused(&["per_sample_weights in mode Max"], true, |given| {
        weigh(given, vector(&[1f64, 2., 3.]).unwrap());
        given.options.mode = BagMode::Max;
    });
}

#[test]
fn calls_that_differ() {
    let errors = on_ranks(3, "differ", |ctx| -> Result<String> {
        let spec = ChunkShardingSpec::on_ranks(0, 0..3)?;
        let table = distribute(&Tensor::ones((6, 4), DType::F64, &Device::Cpu)?, spec, ctx.group())?;
        let max_norm = (ctx.rank() == 2).then_some(0.5);
        let options = EmbeddingOptions::default().max_norm(max_norm);
        Ok(table.embedding(&vector(&[1u32])?, &options).unwrap_err().to_string())
    });
    assert!(errors.iter().all(|error| error == &errors[0]), "{errors:?}");
    let parts = ["rank 2 calls", "Some(0.5)", "rank 0 calls", "None", "same on all ranks"];
    assert!(parts.iter().all(|part| errors[0].contains(part)), "{}", errors[0]);
}

#[test]
fn a_table_without_rows_has_no_padding() {
    let errors = on_ranks(2, "no rows", |ctx| -> Result<String> {
        let spec = ChunkShardingSpec::on_ranks(0, 0..2)?;
        let none = Tensor::zeros((0, 4), DType::F64, &Device::Cpu)?;
        let options = EmbeddingOptions::default().padding_idx(0);
        let table = distribute(&none, spec, ctx.group())?;
        Ok(table.embedding(&Tensor::zeros(0, DType::U32, &device())?, &options).unwrap_err().to_string())
    });
    assert!(errors[0] == errors[1] && errors[0].contains("0 rows; give None"), "{errors:?}");
}

#[test]
fn results_of_ops_are_not_limited() {
    let errors = on_ranks(2, "results", |ctx| -> Result<String> {
        let spec = ChunkShardingSpec::on_ranks(0, 0..2)?;
        let whole = Tensor::ones((6, 4), DType::F64, &Device::Cpu)?;
        let (table, _) = distribute(&whole, spec, ctx.group())?.to_var()?;
        // The gradient of exp is made of its result.
        let exp = LocalOp::new("exp", |x: &Tensor, _: &()| Ok(x.exp()?)).apply(&table, &())?;
        let error = exp.embedding(&vector(&[1u32])?, &right().options.lookup).unwrap_err().to_string();
        assert_eq!(exp.gather_all()?.to_vec2::<f64>()?, whole.exp()?.to_vec2::<f64>()?);
        Ok(error)
    });
    assert!(errors[0] == errors[1] && errors[0].contains("give a parameter"), "{errors:?}");
}

#[test]
fn what_is_no_table() {
    let wrong: [(&[usize], DType, &str); 3] =
        [(&[6], DType::F64, "2 dims"), (&[6, 2, 2], DType::F32, "2 dims"), (&[6, 2], DType::U32, "float")];
    for (dims, dtype, part) in wrong {
        let errors = on_ranks(2, "no table", move |ctx| -> Result<String> {
            let spec = ChunkShardingSpec::on_ranks(0, 0..2)?;
            let table = distribute(&Tensor::zeros(dims, dtype, &Device::Cpu)?, spec, ctx.group())?;
            Ok(table.embedding(&vector(&[1u32])?, &EmbeddingOptions::default()).unwrap_err().to_string())
        });
        assert!(errors[0] == errors[1] && errors[0].contains(part), "{errors:?}");
    }
}

#[test]
fn gradients_by_rows_are_refused_by_ranks_without_shards_too() {
    let errors = on_ranks(2, "by rows", |ctx| -> Result<String> {
        // Rank 1 has no shard.
        let spec = ChunkShardingSpec::on_ranks(0, 0..1)?;
        let table = distribute(&Tensor::zeros(6, DType::F64, &Device::Cpu)?, spec, ctx.group())?;
        Ok(table.to_row_vars().err().map_or_else(String::new, |error| error.to_string()))
    });
    assert!(errors[0] == errors[1] && errors[0].contains("expected [rows, width]"), "{errors:?}");
}
