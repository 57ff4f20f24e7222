//! Comparing a cut model with an uncut one.
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::{Kwargs, LocalPipe, Pipe, Result, StepOptions, StepResult, Value};
use candle_shard::random::{Distribution, Stream, sample_full};
use std::collections::BTreeMap;

pub(crate) type Vb = VarBuilder<'static>;
pub(crate) type Builder = candle_pipe::PipeBuilder<Vb>;

/// What a model gives, written down plainly: outputs by name, and the loss.
pub(crate) type Plain = (BTreeMap<String, Tensor>, Tensor);

/// Normal numbers that follow from a name.
pub(crate) fn numbers(name: &str, dims: &[usize]) -> Tensor {
    let normal = Distribution::Normal { mean: 0.0, stdev: 0.7 };
    sample_full(Stream::new(7, name), normal, dims, DType::F64, &Device::Cpu).unwrap()
}

/// The arguments of a batch.
#[derive(Default, Clone)]
pub(crate) struct Args {
    pub(crate) args: Vec<Value>,
    pub(crate) kwargs: Kwargs,
}

impl Args {
    pub(crate) fn split(&self, chunks: usize) -> Microbatches {
        split_args_kwargs_into_chunks(&self.args, &self.kwargs, chunks, None, None).unwrap()
    }
}

/// A built pipe with parameters that follow from their names.
pub(crate) struct Built {
    pub(crate) local: LocalPipe,
    pub(crate) parameters: VarMap,
    pub(crate) vb: Vb,
}

pub(crate) fn build(pipe: &Pipe<Vb>) -> Built {
    let parameters = VarMap::new();
    let vb = VarBuilder::from_varmap(&parameters, DType::F64, &Device::Cpu);
    let local = LocalPipe::new(pipe, &vb, &Device::Cpu).unwrap();
    for (name, var) in parameters.data().lock().unwrap().iter() {
        var.set(&numbers(name, var.dims())).unwrap();
    }
    Built { local, parameters, vb }
}

/// The largest difference between the elements of two tensors of one shape.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
    if a.elem_count() == 0 {
        return 0.0;
    }
    let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
    let most = (wide(a) - wide(b)).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    most.to_scalar::<f64>().unwrap()
}

pub(crate) fn assert_close(what: &str, a: &Tensor, b: &Tensor) {
    let size = 1.0 + difference(b, &b.zeros_like().unwrap());
    let difference = difference(a, b) / size;
    assert!(difference < 1e-12, "{what}: differs by {difference:e} of its size");
}

impl Built {
    pub(crate) fn step(&self, args: &Args, chunks: usize, options: &StepOptions) -> StepResult {
        self.local.forward_backward(&args.split(chunks), options).unwrap()
    }

    /// Loss, outputs and every gradient of a step against the plain model.
    pub(crate) fn check(&self, args: &Args, plain: impl Fn(&Vb, &Args) -> candle_core::Result<Plain>) {
        let (outputs, loss) = plain(&self.vb, args).unwrap();
        let grads = loss.backward().unwrap();
        let whole = self.local.forward(&args.args, &args.kwargs).unwrap();
        for (name, output) in &outputs {
            assert_close(name, whole[name].tensor().unwrap(), output);
        }
        let options = [
            StepOptions::default(),
            StepOptions::default().split_backward(true),
            StepOptions::default().keep(candle_pipe::Keep::Inputs),
        ];
        for chunks in 1..=5 {
            let batch = args.split(chunks);
            for options in &options {
                let step = self.local.forward_backward(&batch, options).unwrap();
                assert_close("loss", step.loss().unwrap(), &loss);
                let merged = batch.merge(&step.outputs, None).unwrap();
                for (name, output) in &outputs {
                    assert_close(name, merged.get(name).unwrap().tensor().unwrap(), output);
                }
                for (name, var) in self.parameters.data().lock().unwrap().iter() {
                    let zeros = var.zeros_like().unwrap();
                    let want = grads.get(var).unwrap_or(&zeros);
                    let got = step.grads.get(var).unwrap_or(&zeros);
                    assert_close(&format!("gradient of {name}, {chunks} chunks, {options:?}"), got, want);
                    assert!(!got.track_op(), "the gradient of {name} holds a graph");
                }
            }
            let evaluated = self.local.evaluate(&batch, &StepOptions::default()).unwrap();
            assert_close("evaluated loss", evaluated.loss().unwrap(), &loss);
        }
    }

    /// Every gradient of a step, bit by bit.
    pub(crate) fn bits(&self, step: &StepResult) -> BTreeMap<String, Option<Vec<u64>>> {
        let bits = |t: &Tensor| -> Vec<u64> {
            let flat = t.flatten_all().unwrap().to_vec1::<f64>().unwrap();
            flat.into_iter().map(f64::to_bits).collect()
        };
        let parameters = self.parameters.data().lock().unwrap();
        parameters.iter().map(|(name, var)| (name.clone(), step.grads.get(var).map(bits))).collect()
    }
}

/// The error of declaring a model, as text.
pub(crate) fn fault(declare: impl FnOnce(&mut Builder) -> candle_pipe::SplitSpec) -> String {
    let mut g = Builder::new();
    let split = declare(&mut g);
    g.finish(split).unwrap_err().to_string()
}

/// A function that is the identity.
pub(crate) fn same(xs: &[Value], _: &candle_pipe::Ctx) -> Result<Value> {
    Ok(xs[0].clone())
}
