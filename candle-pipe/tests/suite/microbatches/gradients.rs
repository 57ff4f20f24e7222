//! Gradients flow through cutting and joining to the whole.
use crate::microbatches::{counting, list};
use candle_core::{Tensor, Var};
use candle_pipe::microbatch::{ChunkSpec, LossReducer, Replicate, Splitter, TensorChunkSpec};
use candle_pipe::{Kwargs, Result, Value};

/// A layer with a nonlinearity, and its mean square loss.
fn model(x: &Tensor, weight: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
    let y = x.matmul(weight)?.tanh()?;
    let loss = y.sqr()?.mean_all()?;
    Ok((y, loss))
}

fn assert_close(a: &Tensor, b: &Tensor, what: &str) {
    assert_eq!(a.dims(), b.dims(), "{what}");
    let pairs = list(&a.into()).into_iter().zip(list(&b.into()));
    pairs.for_each(|(a, b)| assert!((a - b).abs() < 1e-12, "{what}: {a} and {b}"));
}

fn leaves() -> Result<(Var, Var)> {
    let x = Var::from_tensor(&counting(&[7, 3]).affine(0.05, -0.4)?)?;
    let weight = Var::from_tensor(&counting(&[3, 2]).affine(0.2, -0.5)?)?;
    Ok((x, weight))
}

#[test]
fn of_outputs_and_losses_are_those_of_the_batch() -> Result<()> {
    let (x, weight) = leaves()?;
    let (y, loss) = model(&x, &weight)?;
    let seed = counting(&[7, 2]);
    let expected = (y.mul(&seed)?.sum_all()? + &loss)?.backward()?;
    let spec = ChunkSpec::from((TensorChunkSpec(0), LossReducer::mean_reducer()));
    let (args, args_spec) =
        ([x.as_tensor().into(), weight.as_tensor().into()], [TensorChunkSpec(0).into(), Replicate]);
    for chunks in [1, 2, 3, 7, 20] {
        let batch = Splitter::new(chunks).split(&args, &Kwargs::new(), Some(&args_spec), None)?;
        let outputs = batch.args.iter().map(|args| Ok(model(args[0].tensor()?, args[1].tensor()?)?.into()));
        let whole = batch.merge(&outputs.collect::<Result<Vec<Value>>>()?, Some(&spec))?;
        let (joined, mean) = (whole.at(0)?.tensor()?, whole.at(1)?.tensor()?);
        assert_close(joined, &y, "outputs");
        assert_close(mean, &loss, "loss");
        let gradients = (joined.mul(&seed)?.sum_all()? + mean)?.backward()?;
        for (name, var) in [("x", &x), ("weight", &weight)] {
            assert_close(gradients.get(var).unwrap(), expected.get(var).unwrap(), name);
        }
    }
    Ok(())
}

/// What a schedule does: one backward a chunk, each with its share of the rows.
#[test]
fn of_weighted_chunks_sum_to_those_of_the_batch() -> Result<()> {
    let (x, weight) = leaves()?;
    let expected = model(&x, &weight)?.1.backward()?;
    let batch = Splitter::new(4).split(&[x.as_tensor().into()], &Kwargs::new(), None, None)?;
    let mut sum = weight.zeros_like()?;
    for (args, share) in batch.args.iter().zip(batch.weights()) {
        let gradients = model(args[0].tensor()?, &weight)?.1.affine(share, 0.)?.backward()?;
        sum = (sum + gradients.get(&weight).unwrap())?;
    }
    assert_close(&sum, expected.get(&weight).unwrap(), "weight");
    Ok(())
}

#[test]
fn of_masked_chunks_are_those_of_the_batch() -> Result<()> {
    let (x, weight) = leaves()?;
    let seed = counting(&[7, 2]);
    let expected = model(&x, &weight)?.0.mul(&seed)?.sum_all()?.backward()?;
    let batch = Splitter::new(3).masked().split(&[x.as_tensor().into()], &Kwargs::new(), None, None)?;
    let outputs = batch.args.iter().map(|args| Ok(model(args[0].tensor()?, &weight)?.0.into()));
    let whole = batch.merge(&outputs.collect::<Result<Vec<Value>>>()?, None)?;
    let gradients = whole.tensor()?.mul(&seed)?.sum_all()?.backward()?;
    for (name, var) in [("x", &x), ("weight", &weight)] {
        assert_close(gradients.get(var).unwrap(), expected.get(var).unwrap(), name);
    }
    Ok(())
}
