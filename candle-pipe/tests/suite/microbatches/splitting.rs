//! Arguments cut into chunks.
use crate::microbatches::{counting, kwargs, list, listing, of, specs};
use candle_core::{DType, Device, Tensor};
use candle_pipe::microbatch::{
    ChunkSpec, Replicate, Splitter, TensorChunkSpec, split_args_kwargs_into_chunks,
};
use candle_pipe::{Kwargs, Result, Value};
use std::collections::BTreeMap;

#[test]
fn sizes_are_those_of_tensor_split() -> Result<()> {
    let table: [(usize, usize, &[usize]); 6] = [
        (10, 4, &[3, 3, 2, 2]),
        (8, 4, &[2, 2, 2, 2]),
        (5, 2, &[3, 2]),
        (3, 8, &[1, 1, 1]),
        (1, 1, &[1]),
        (7, 1, &[7]),
    ];
    for (rows, chunks, sizes) in table {
        let batch = split_args_kwargs_into_chunks(&[of(&[rows, 2])], &Kwargs::new(), chunks, None, None)?;
        assert_eq!((batch.len(), batch.rows()), (sizes.len(), sizes));
        let shapes = sizes.iter().map(|n| format!("f64[{n}, 2]"));
        assert_eq!(listing(batch.args.iter().map(|args| &args[0])), shapes.collect::<Vec<_>>());
        assert!((batch.weights().iter().sum::<f64>() - 1.0).abs() < 1e-15);
    }
    Ok(())
}

#[test]
fn without_specs_tensors_are_cut_along_dim_0_and_plain_values_go_to_all() -> Result<()> {
    let args = [of(&[4, 3]), (of(&[4]), vec![1, 2], "text").into(), ().into()];
    let kwargs = kwargs([("deep", BTreeMap::from([("x", of(&[4, 1]))]).into()), ("flag", true.into())]);
    let batch = split_args_kwargs_into_chunks(&args, &kwargs, 2, None, None)?;
    for (args, kwargs) in batch.iter() {
        assert_eq!(listing(args), ["f64[2, 3]", r#"(f64[2], [1, 2], "text")"#, "none"]);
        assert_eq!(Value::Map(kwargs.clone()).to_string(), "{deep: {x: f64[2, 1]}, flag: true}");
    }
    assert_eq!(list(batch.args[1][1].at(0)?), [2., 3.]);
    Ok(())
}

#[test]
fn specs_of_kwargs_belong_by_name_not_by_place() -> Result<()> {
    // By position, "a" would be cut along dim 1 and "z" along dim 0.
    let values = kwargs([("a", of(&[4, 6])), ("z", of(&[6, 4]))]);
    let dims = specs([("z", TensorChunkSpec(1).into()), ("a", TensorChunkSpec(0).into())]);
    let batch = split_args_kwargs_into_chunks(&[], &values, 2, None, Some(&dims))?;
    let shapes = batch.kwargs.iter().map(|kwargs| Value::Map(kwargs.clone()));
    assert_eq!(listing(shapes), ["{a: f64[2, 6], z: f64[6, 2]}"; 2]);

    let wrong = specs([("a", TensorChunkSpec(0).into()), ("y", TensorChunkSpec(1).into())]);
    let error = split_args_kwargs_into_chunks(&[], &values, 2, None, Some(&wrong)).unwrap_err();
    assert_eq!(error.to_string(), "microbatches: kwargs.z has no chunk spec; give it one, or Replicate");
    Ok(())
}

#[test]
fn nested_specs_negative_dims_and_replicated_tensors() -> Result<()> {
    let args = [(of(&[2, 5]), [of(&[5]), of(&[1, 5, 2])]).into(), of(&[3])];
    let dims = TensorChunkSpec::from_tuple((-1, [0, -2]))?;
    let args_spec = [ChunkSpec::Tuple(dims), Replicate];
    let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), 2, Some(&args_spec), None)?;
    let chunks = batch.args.iter().map(|args| Value::List(args.clone()));
    assert_eq!(
        listing(chunks),
        ["[(f64[2, 3], [f64[3], f64[1, 3, 2]]), f64[3]]", "[(f64[2, 2], [f64[2], f64[1, 2, 2]]), f64[3]]"]
    );
    assert_eq!(list(batch.args[1][0].at(0)?), [3., 4., 8., 9.]);
    Ok(())
}

#[test]
fn a_spec_covers_a_whole_container() -> Result<()> {
    let args = [(of(&[3, 4]), [of(&[2, 4])], 7).into(), (of(&[5]), 1).into()];
    let args_spec = [TensorChunkSpec(-1).into(), Replicate];
    let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), 4, Some(&args_spec), None)?;
    assert_eq!(listing(&batch.args[3]), ["(f64[3, 1], [f64[2, 1]], 7)", "(f64[5], 1)"]);
    Ok(())
}

#[test]
fn args_and_kwargs_keep_in_step() -> Result<()> {
    let (args, kwargs) = ([of(&[8])], kwargs([("few", of(&[3]))]));
    let error = split_args_kwargs_into_chunks(&args, &kwargs, 4, None, None).unwrap_err().to_string();
    let text = "microbatches: args[0] has 8 rows along dim 0, kwargs.few has 3 along dim 0; give both the same batch \
                size, Replicate one of them, or allow it with Splitter::unequal_batches";
    assert_eq!(error, text);

    let batch = Splitter::new(4).unequal_batches().split(&args, &kwargs, None, None)?;
    assert_eq!(listing(batch.args.iter().map(|args| &args[0])), ["f64[3]", "f64[3]", "f64[2]"]);
    assert_eq!(listing(batch.kwargs.iter().map(|kwargs| &kwargs["few"])), ["f64[1]"; 3]);
    assert_eq!(batch.rows(), [3, 3, 2]);

    let replicated = specs([("few", Replicate)]);
    let batch = split_args_kwargs_into_chunks(&args, &kwargs, 4, None, Some(&replicated))?;
    assert_eq!((batch.len(), batch.kwargs[3]["few"].to_string()), (4, "f64[3]".into()));
    Ok(())
}

#[test]
fn nothing_to_cut_gives_as_many_chunks_as_asked_for() -> Result<()> {
    let batch = split_args_kwargs_into_chunks(&[], &Kwargs::new(), 5, None, None)?;
    assert_eq!((batch.args.len(), batch.kwargs.len(), batch.rows()), (5, 5, [1; 5].as_slice()));
    assert!(batch.iter().all(|(args, kwargs)| args.is_empty() && kwargs.is_empty()));
    let batch = split_args_kwargs_into_chunks(&[3.into()], &Kwargs::new(), 2, None, None)?;
    assert_eq!((listing(batch.args.concat()), batch.weights()), (vec!["3".into(), "3".into()], vec![0.5; 2]));
    Ok(())
}

#[test]
fn chunks_are_views_of_any_dtype() -> Result<()> {
    let address = |t: &Tensor| std::ptr::from_ref(&*t.storage_and_layout().0).addr();
    for dtype in [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64] {
        let whole = counting(&[5, 3]).to_dtype(dtype)?;
        for dim in [0, 1] {
            let spec = [TensorChunkSpec(dim).into()];
            let batch =
                split_args_kwargs_into_chunks(&[(&whole).into()], &Kwargs::new(), 3, Some(&spec), None)?;
            for args in &batch.args {
                assert_eq!(address(args[0].tensor()?), address(&whole));
            }
        }
    }
    let empty = Tensor::zeros((4, 0), DType::F32, &Device::Cpu)?;
    let batch = split_args_kwargs_into_chunks(&[empty.into()], &Kwargs::new(), 3, None, None)?;
    assert_eq!(listing(batch.args.concat()), ["f32[2, 0]", "f32[1, 0]", "f32[1, 0]"]);
    Ok(())
}
