//! What chunks gave, joined.
use crate::microbatches::{counting, list, listing, of};
use candle_core::{DType, Device, Tensor};
use candle_pipe::microbatch::{
    ChunkSpec, CustomReducer, LossReducer, Replicate, TensorChunkSpec, merge_chunks,
    split_args_kwargs_into_chunks,
};
use candle_pipe::{Kwargs, Result, Value};
use std::collections::BTreeMap;

fn scalar(x: f64) -> Value {
    Tensor::new(x, &Device::Cpu).unwrap().into()
}

#[test]
fn tensors_are_joined_along_their_dims_in_the_structure_of_the_chunks() -> Result<()> {
    let chunk = |rows: usize| -> Value {
        let map = BTreeMap::from([("y", of(&[2, rows])), ("z", of(&[rows]))]);
        (of(&[rows, 2]), [map]).into()
    };
    let spec = ChunkSpec::from((
        TensorChunkSpec(0),
        [BTreeMap::from([("y", ChunkSpec::from(TensorChunkSpec(-1))), ("z", TensorChunkSpec(0).into())])],
    ));
    let whole = merge_chunks(&[chunk(3), chunk(1), chunk(2)], Some(&spec))?;
    assert_eq!(whole.to_string(), "(f64[6, 2], [{y: f64[2, 6], z: f64[6]}])");
    assert_eq!(list(whole.at(1)?.at(0)?.get("y")?), [0., 1., 2., 0., 0., 1., 3., 4., 5., 1., 2., 3.]);
    Ok(())
}

#[test]
fn chunks_without_rows_join() -> Result<()> {
    let chunks = [of(&[0, 2]), of(&[3, 2]), of(&[0, 2])];
    assert_eq!(list(&merge_chunks(&chunks, None)?), [0., 1., 2., 3., 4., 5.]);
    assert_eq!(merge_chunks(&[of(&[0, 2]), of(&[0, 2])], None)?.to_string(), "f64[0, 2]");
    assert_eq!(merge_chunks(&[of(&[2, 0]), of(&[1, 0])], None)?.to_string(), "f64[3, 0]");
    let columns = [of(&[2, 0]), of(&[2, 1])];
    assert_eq!(merge_chunks(&columns, Some(&TensorChunkSpec(1).into()))?.to_string(), "f64[2, 1]");
    Ok(())
}

#[test]
fn replicated_values_are_the_same_bit_by_bit() -> Result<()> {
    let mask = |last: f32| -> Value { Tensor::new(&[0f32, f32::NAN, last], &Device::Cpu).unwrap().into() };
    let merged = merge_chunks(&[mask(1.), mask(1.), mask(1.)], Some(&Replicate))?;
    assert!(merged.same(&mask(1.))?);
    let error = |chunks: &[Value]| merge_chunks(chunks, Some(&Replicate)).unwrap_err().to_string();
    let fix = "it must be the same in every chunk, or have a TensorChunkSpec or reducer";
    assert_eq!(
        error(&[mask(1.), mask(1.), mask(2.)]),
        format!("microbatches: output: chunk 2 has f32[3], chunk 0 has f32[3] (compared bit by bit); {fix}")
    );
    let nested = |n: i64| Value::from((0, BTreeMap::from([("mask", vec![n])])));
    assert_eq!(
        error(&[nested(1), nested(4)]),
        format!("microbatches: output[1].mask[0]: chunk 1 has 4, chunk 0 has 1; {fix}")
    );
    assert_eq!(merge_chunks(&[nested(1), nested(1)], None)?.to_string(), "(0, {mask: [1]})");
    Ok(())
}

#[test]
fn reducers_fold_in_the_order_of_the_chunks() -> Result<()> {
    let texts = CustomReducer::new("", |so_far, chunk| {
        Ok(format!("{}{}", so_far.text()?, chunk.at(1)?.text()?).into())
    });
    let spec = ChunkSpec::from((
        texts,
        LossReducer::custom(CustomReducer::new(0, |n, _| Ok((n.int()? + 1).into()))),
    ));
    let chunks = ["a", "b", "c"].map(|text| Value::from(((1, text), scalar(0.))));
    assert_eq!(merge_chunks(&chunks, Some(&spec))?.to_string(), r#"("abc", 3)"#);
    Ok(())
}

#[test]
fn losses_are_summed_or_weighted_by_rows() -> Result<()> {
    let x = counting(&[10]);
    let batch = split_args_kwargs_into_chunks(&[(&x).into()], &Kwargs::new(), 4, None, None)?;
    let per_chunk = |loss: &dyn Fn(&Tensor) -> candle_core::Result<Value>| -> Result<Vec<Value>> {
        batch.args.iter().map(|args| Ok(loss(args[0].tensor()?)?)).collect()
    };
    let (sum, mean) =
        (ChunkSpec::from(LossReducer::sum_reducer()), ChunkSpec::from(LossReducer::mean_reducer()));

    let sums = per_chunk(&|x| Ok(x.sum_all()?.into()))?;
    assert_eq!(list(&batch.merge(&sums, Some(&sum))?), [45.]);
    assert_eq!(list(&merge_chunks(&sums, Some(&sum))?), [45.]);

    let means = per_chunk(&|x| Ok(x.mean_all()?.into()))?;
    let merged = batch.merge(&means, Some(&mean))?;
    assert!((list(&merged)[0] - 4.5).abs() < 1e-14, "{:?}", list(&merged));
    assert_eq!(merged.to_string(), "f64[]");
    let floats = per_chunk(&|x| Ok(x.mean_all()?.to_scalar::<f64>()?.into()))?;
    assert!((batch.merge(&floats, Some(&mean))?.float()? - 4.5).abs() < 1e-14);
    let kept = per_chunk(&|x| Ok(x.mean_keepdim(0)?.to_dtype(DType::F32)?.into()))?;
    assert_eq!(batch.merge(&kept, Some(&mean))?.to_string(), "f32[1]");
    Ok(())
}

#[test]
fn arguments_come_back_as_they_were() -> Result<()> {
    let args = [of(&[5, 2]), (of(&[2, 5]), "x", of(&[3])).into()];
    let spec = [TensorChunkSpec(0).into(), ChunkSpec::from((TensorChunkSpec(1), Replicate, Replicate))];
    let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), 3, Some(&spec), None)?;
    let chunks: Vec<_> = batch.args.iter().cloned().map(Value::List).collect();
    let whole = merge_chunks(&chunks, Some(&ChunkSpec::List(spec.to_vec())))?;
    assert!(whole.same(&Value::List(args.to_vec()))?, "{whole}");
    assert_eq!(listing(&args), listing(whole.items()?));
    Ok(())
}
