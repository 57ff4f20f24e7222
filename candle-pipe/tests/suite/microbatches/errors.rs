//! What cannot be cut or joined, refused with the place and the fix.
use crate::microbatches::{kwargs, of, specs};
use candle_core::{DType, Device, Tensor};
use candle_pipe::microbatch::{
    ChunkSpec, LossReducer, Replicate, Splitter, TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks,
};
use candle_pipe::{Error, Kwargs, Value};

/// Arguments, chunks, specs, and why they are refused.
type Refused<'a> = (&'a [Value], usize, Option<&'a [ChunkSpec]>, &'a str);

fn reason(error: Error) -> String {
    let Error::Microbatches(reason) = error else { panic!("{error}") };
    reason
}

#[test]
fn of_splitting() {
    let dim = |dim| ChunkSpec::from(TensorChunkSpec(dim));
    let table: [Refused<'_>; 13] = [
        (&[1.into()], usize::MAX, None, "18446744073709551615 chunks are too many; ask for 1048576 at most"),
        (&[of(&[4])], 0, None, "a batch cannot be cut into 0 chunks; ask for 1 or more"),
        (
            &[of(&[])],
            2,
            None,
            "args[0]: f64[] has no dims, so TensorChunkSpec(0) does not fit; use Replicate, or a reducer for outputs",
        ),
        (&[1.into(), of(&[0, 3])], 2, None, "args[1]: f64[0, 3] has no rows along dim 0 to cut into chunks"),
        (
            &[of(&[4, 3])],
            2,
            Some(&[dim(2)]),
            "args[0]: TensorChunkSpec(2) is outside f64[4, 3], whose dims are -2 to 1",
        ),
        (
            &[of(&[4, 3])],
            2,
            Some(&[dim(-3)]),
            "args[0]: TensorChunkSpec(-3) is outside f64[4, 3], whose dims are -2 to 1",
        ),
        (
            &[of(&[4])],
            2,
            Some(&[dim(i64::MIN)]),
            "args[0]: TensorChunkSpec(-9223372036854775808) is outside f64[4], whose dims are -1 to 0",
        ),
        (
            &[7.into()],
            2,
            Some(&[dim(0)]),
            "args[0] is an int and cannot be cut by TensorChunkSpec(0); use Replicate",
        ),
        (&[of(&[4]), of(&[4])], 2, Some(&[dim(0)]), "args[1] has no chunk spec; give it one, or Replicate"),
        (&[], 2, Some(&[dim(0)]), "there is a chunk spec TensorChunkSpec(0) for args[0], but no such value"),
        (
            &[(of(&[4]), [of(&[4])]).into()],
            2,
            Some(&[(dim(0), [Replicate, Replicate]).into()]),
            "there is a chunk spec Replicate for args[0][1][1], but no such value",
        ),
        (
            &[of(&[4])],
            2,
            Some(&[[dim(0)].into()]),
            "args[0] is a tensor, but its chunk spec is [TensorChunkSpec(0)]; give one spec",
        ),
        (
            &[of(&[4])],
            2,
            Some(&[LossReducer::sum_reducer().into()]),
            "args[0]: LossReducer(sum) joins outputs and cannot cut; use TensorChunkSpec or Replicate",
        ),
    ];
    for (args, chunks, spec, text) in table {
        let error = split_args_kwargs_into_chunks(args, &Kwargs::new(), chunks, spec, None).unwrap_err();
        assert_eq!(reason(error), text);
    }
}

#[test]
fn of_batch_sizes() {
    let args = [(1, [of(&[2, 8])]).into(), of(&[3])];
    let spec = [(Replicate, [ChunkSpec::from(TensorChunkSpec(1))]).into(), TensorChunkSpec(0).into()];
    for splitter in [Splitter::new(4), Splitter::new(1), Splitter::new(4).masked()] {
        let error = splitter.split(&args, &Kwargs::new(), Some(&spec), None).unwrap_err();
        let text = "args[0][1][0] has 8 rows along dim 1, args[1] has 3 along dim 0; ";
        assert!(reason(error.clone()).starts_with(text), "{error}");
    }
    let extra = specs([("mask", Replicate), ("x", Replicate)]);
    let error = Splitter::new(2).split(&[], &kwargs([("x", of(&[2]))]), None, Some(&extra)).unwrap_err();
    assert_eq!(reason(error), "there is a chunk spec Replicate for kwargs.mask, but no such value");
}

#[test]
fn of_dims() {
    let error = TensorChunkSpec::from_tuple((0, ("x", 1))).unwrap_err();
    assert_eq!(reason(error), "from_tuple[1][0]: dims are whole numbers, this is a text");
    let error = TensorChunkSpec::from_tuple(0).unwrap_err();
    assert_eq!(reason(error), "from_tuple expects a tuple of dims, got TensorChunkSpec(0)");
    let error = TensorChunkSpec::from_dict((0, 1)).unwrap_err();
    assert_eq!(
        reason(error),
        "from_dict expects a map of dims, got (TensorChunkSpec(0), TensorChunkSpec(1))"
    );
}

#[test]
fn of_merging() {
    let split = ChunkSpec::from(TensorChunkSpec(0));
    let (sum, mean) =
        (ChunkSpec::from(LossReducer::sum_reducer()), ChunkSpec::from(LossReducer::mean_reducer()));
    let single = |dtype| Value::from(Tensor::zeros((), dtype, &Device::Cpu).unwrap());
    let structure = "chunks must have one structure";
    let mean_text = "output: a mean of losses is weighted by the chunks' rows, which are not known here; join with \
                     Microbatches::merge, and not in masked mode, where losses are of more rows than the chunk's";
    let table: [(&[Value], Option<&ChunkSpec>, &str); 16] = [
        (&[], None, "there are no chunks to join; give at least one"),
        (
            &[of(&[])],
            None,
            "output: f64[] has no dims, so TensorChunkSpec(0) does not fit; use Replicate, or a reducer for outputs",
        ),
        (
            &[1.into(), 2.into()],
            None,
            "output: chunk 1 has 2, chunk 0 has 1; it must be the same in every chunk, or have a TensorChunkSpec or reducer",
        ),
        (
            &[1.into()],
            Some(&split),
            "output is an int and cannot be joined by TensorChunkSpec(0); use Replicate or a reducer",
        ),
        (
            &[of(&[2, 3]), of(&[2, 4])],
            None,
            "output: chunk 1 is f64[2, 4], chunk 0 is f64[2, 3]; chunks may differ in dim 0 alone",
        ),
        (
            &[of(&[2]), of(&[2, 3])],
            None,
            "output: chunk 1 is f64[2, 3], chunk 0 is f64[2]; chunks may differ in dim 0 alone",
        ),
        (
            &[of(&[2]), Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap().into()],
            None,
            "output: chunk 1 is f32[2], chunk 0 is f64[2]; chunks may differ in dim 0 alone",
        ),
        (
            &[(1, 2).into(), (1,).into()],
            None,
            &format!("output: chunk 1 is (1,), chunk 0 is (1, 2); {structure}"),
        ),
        (
            &[(1, of(&[1])).into(), (1, 2).into()],
            None,
            &format!("output[1]: chunk 1 is 2, chunk 0 is f64[1]; {structure}"),
        ),
        (
            &[of(&[2]), [of(&[2])].into()],
            None,
            &format!("output: chunk 1 is [f64[2]], chunk 0 is f64[2]; {structure}"),
        ),
        (
            &[(of(&[2]), 1).into()],
            Some(&(TensorChunkSpec(0),).into()),
            "output[1] has no chunk spec; give it one, or Replicate",
        ),
        (
            &[of(&[2])],
            Some(&(TensorChunkSpec(0),).into()),
            "output is a tensor, but its chunk spec is (TensorChunkSpec(0),); give one spec",
        ),
        (
            &[of(&[2]), of(&[2])],
            Some(&sum),
            "output: the loss of chunk 0 is f64[2], which is not one number; TensorChunkSpec(0) joins rows",
        ),
        (
            &[single(DType::F32), single(DType::U32)],
            Some(&sum),
            "output: the loss of chunk 1 is u32[], which is not floating",
        ),
        (
            &[single(DType::F32), 0.5.into()],
            Some(&sum),
            "output: the loss of chunk 1 is 0.5, unlike chunk 0's",
        ),
        (&[single(DType::F32)], Some(&mean), mean_text),
    ];
    for (chunks, spec, text) in table {
        assert_eq!(reason(merge_chunks(chunks, spec).unwrap_err()), text);
    }
    let error = merge_chunks(&[().into()], Some(&sum)).unwrap_err();
    assert_eq!(reason(error), "output: the loss of chunk 0 is none, which is neither a tensor nor a float");
}

#[test]
fn of_a_batch() -> candle_pipe::Result<()> {
    let split = |splitter: Splitter| splitter.split(&[of(&[5])], &Kwargs::new(), None, None);
    let batch = split(Splitter::new(3))?;
    let error = batch.merge(&[of(&[2]), of(&[2])], None).unwrap_err();
    assert_eq!(reason(error), "2 outputs for 3 chunks; give one for each");

    let masked = split(Splitter::new(2).masked())?;
    let mean = ChunkSpec::from(LossReducer::mean_reducer());
    assert!(
        reason(masked.merge(&[0.5.into(), 0.5.into()], Some(&mean)).unwrap_err())
            .ends_with("than the chunk's")
    );
    let error = masked.merge(&[of(&[7]), of(&[7])], None).unwrap_err();
    let text =
        "output: masked chunks of 5 rows gave f64[7] with 7 places along dim 0, which do not belong to rows";
    assert_eq!(reason(error), text);
    let error = masked.merge(&[of(&[5]), of(&[4])], None).unwrap_err();
    assert_eq!(reason(error), "output: chunk 1 is f64[4], chunk 0 is f64[5]; masked chunks have one shape");
    Ok(())
}
