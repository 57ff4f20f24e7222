//! Masked mode: chunks of the batch's shape, so that kernels do what they do for the batch.
use crate::microbatches::{kwargs, list, listing, of};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module};
use candle_pipe::microbatch::{ChunkSpec, Replicate, Splitter, TensorChunkSpec};
use candle_pipe::{Kwargs, Result, Value};

#[test]
fn a_forward_is_the_batchs_bit_by_bit() -> Result<()> {
    let random = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &Device::Cpu);
    let (first, bias, second) = (random(&[64, 33])?, random(&[64])?, random(&[5, 64])?);
    let (first, second) = (Linear::new(first, Some(bias)), Linear::new(second, None));
    let mlp = |x: &Tensor| second.forward(&first.forward(x)?.gelu_erf()?);
    for (rows, chunks) in [(37, 4), (37, 37), (8, 3), (5, 1)] {
        let x = random(&[rows, 33])?;
        let batch = Splitter::new(chunks).masked().split(&[(&x).into()], &Kwargs::new(), None, None)?;
        assert!(batch.args.iter().all(|args| args[0].tensor().unwrap().dims() == x.dims()));
        let outputs = batch.args.iter().map(|args| Ok(mlp(args[0].tensor()?)?.into()));
        let whole = batch.merge(&outputs.collect::<Result<Vec<_>>>()?, None)?;
        assert!(whole.same(&mlp(&x)?.into())?, "{rows} rows in {chunks} chunks");
    }
    Ok(())
}

#[test]
fn each_chunk_has_its_own_rows_along_its_dim() -> Result<()> {
    let args = [of(&[2, 3]), of(&[2])];
    let spec = [TensorChunkSpec(-1).into(), Replicate];
    let labels = kwargs([("labels", Tensor::new(&[5u32, 6, 7], &Device::Cpu)?.into())]);
    let batch = Splitter::new(2).masked().split(&args, &labels, Some(&spec), None)?;
    assert_eq!(batch.rows(), [2, 1]);
    assert_eq!(list(&batch.args[0][0]), [0., 1., 0., 3., 4., 0.]);
    assert_eq!(list(&batch.args[1][0]), [0., 0., 2., 0., 0., 5.]);
    assert_eq!(list(&batch.args[1][1]), [0., 1.]);
    assert_eq!(batch.kwargs[1]["labels"].tensor()?.to_vec1::<u32>()?, [0, 0, 7]);
    Ok(())
}

#[test]
fn outputs_may_have_several_places_a_row() -> Result<()> {
    let x = Tensor::arange(0u32, 20, &Device::Cpu)?.to_dtype(DType::F64)?.reshape((10, 2))?;
    let batch = Splitter::new(4).masked().split(&[x.into()], &Kwargs::new(), None, None)?;
    let tokens = batch.args.iter().map(|args| Ok(args[0].tensor()?.flatten_all()?.into()));
    let whole = batch.merge(&tokens.collect::<Result<Vec<Value>>>()?, None)?;
    assert_eq!(list(&whole), list(&of(&[20])));

    let rows = batch.args.iter().map(|args| Value::from((&args[0].tensor().unwrap().t().unwrap(), 3)));
    let spec = ChunkSpec::from((TensorChunkSpec(1), Replicate));
    let whole = batch.merge(&rows.collect::<Vec<_>>(), Some(&spec))?;
    assert_eq!(listing(whole.items()?), ["f64[2, 10]", "3"]);
    assert_eq!(list(whole.at(0)?)[..10], [0., 2., 4., 6., 8., 10., 12., 14., 16., 18.]);
    Ok(())
}
