//! Comparison of a declared model with the plain model that it came from.
use super::LocalPipe;
use crate::graph::{NamedTensors, Scope};
use crate::microbatch::split_args_kwargs_into_chunks;
use crate::pipe::{LOSS, Pipe};
use crate::step::StepOptions;
use crate::tape::backward;
use crate::{Error, Kwargs, Result, Value, ValuePath};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, TensorId};
use std::collections::{BTreeMap, HashSet};

/// The most differences that an error lists.
const LISTED: usize = 8;

impl<B: Scope> Pipe<B> {
    /// Compares this pipe with its plain model: outputs, loss, parameters and all gradients.
    ///
    /// `plain` builds the model from the scope, runs it on the arguments in evaluation mode, and returns its outputs by
    /// name, with the loss as `loss` if the pipe has one. The pipe runs in one process, on one microbatch, in
    /// evaluation mode. Two numbers are equal if they differ by at most `tolerance` times the largest number of their
    /// tensor, or times 1 if that is larger. A scope that creates each parameter only once, like a `MeshVarBuilder`,
    /// cannot serve both models.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Module, VarBuilder, VarMap, linear};
    /// use candle_pipe::{EqualCount, In, Kwargs, PipeBuilder, LossReduction, Value};
    ///
    /// let declare = |slope: f64| {
    ///     let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    ///     let x = g.input("x", In::Arg);
    ///     let h = g.module("up", |vb| Ok(linear(2, 3, vb.clone())?), [x]);
    ///     let y = g.func("scale", move |xs, _| Ok((xs[0].tensor()? * slope)?.into()), [h]);
    ///     g.output("y", y);
    ///     g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
    ///     g.finish(EqualCount(2))
    /// };
    /// let plain = |vb: &VarBuilder<'static>, args: &[Value], _: &Kwargs| {
    ///     let y = (linear(2, 3, vb.pp("up"))?.forward(args[0].tensor()?)? * 0.5)?;
    ///     Ok(Kwargs::from([("loss".into(), y.sqr()?.mean_all()?.into()), ("y".into(), y.into())]))
    /// };
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let args = [Tensor::ones((4, 2), DType::F32, &Device::Cpu)?.into()];
    /// declare(0.5)?.check_against(&vb, &Device::Cpu, &args, &Kwargs::new(), 1e-6, plain)?;
    ///
    /// let error = declare(0.4)?.check_against(&vb, &Device::Cpu, &args, &Kwargs::new(), 1e-6, plain).unwrap_err().to_string();
    /// assert!(error.contains("output \"y\"") && error.contains("the gradient of up.weight"), "{error}");
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Pipe`] with the differences, and the errors of both models.
    pub fn check_against(
        &self,
        scope: &B,
        device: &Device,
        args: &[Value],
        kwargs: &Kwargs,
        tolerance: f64,
        plain: impl FnOnce(&B, &[Value], &Kwargs) -> Result<Kwargs>,
    ) -> Result<()> {
        if tolerance.is_nan() || tolerance < 0.0 {
            return Err(Error::Pipe(format!(
                "a comparison with tolerance {tolerance}; give a number from 0"
            )));
        }
        let local = LocalPipe::new(self, scope, device)?;
        let (outputs, named) = scope.on(device)?.watch(|scope| plain(scope, args, kwargs))?;
        let batch = split_args_kwargs_into_chunks(args, kwargs, 1, None, None)?;
        let options = StepOptions::default().training(false);
        let has_loss = self.info().graph.loss.is_some();
        let step = if has_loss {
            local.forward_backward(&batch, &options)?
        } else {
            local.evaluate(&batch, &options)?
        };

        let mut found = Differences { tolerance, texts: Vec::new() };
        let made = step.outputs[0].map()?;
        // Without a loss, the name is that of any output.
        let is_output = |name: &str| !has_loss || name != LOSS;
        for name in made.keys().filter(|name| !outputs.contains_key(*name) && is_output(name)) {
            found.add(format!("output {name:?} is only in the pipe"));
        }
        for (name, want) in outputs.iter().filter(|(name, _)| is_output(name)) {
            match made.get(name) {
                Some(got) => found.values(&format!("output {name:?}"), got, want)?,
                None if name == LOSS => {} // said below
                None => found.add(format!("output {name:?} is only in the plain model")),
            }
        }
        let is_loss = has_loss || !made.contains_key(LOSS);
        let loss = outputs.get(LOSS).filter(|_| is_loss).map(Value::full_tensor).transpose()?;
        match (has_loss, &loss) {
            (true, Some(want)) => found.tensors("the loss", step.loss()?, want)?,
            (true, None) => {
                found.add("the loss is only in the pipe; give it among the outputs as \"loss\"".into());
            }
            (false, Some(_)) => found.add("the loss is only in the plain model".into()),
            (false, None) => {}
        }
        let want = loss.as_ref().map(backward).transpose()?.unwrap_or_default();
        let variables = Variables::new(&local, &named, &want, &mut found)?;
        variables.compare(&step.grads, &want, has_loss && loss.is_some(), &mut found)?;
        found.into_result()
    }
}

/// The variables of both models: their names, and their ids in the pipe and in the plain model.
struct Variables(Vec<(String, TensorId, TensorId)>);

impl Variables {
    fn new(
        local: &LocalPipe,
        plain: &NamedTensors,
        want: &GradStore,
        found: &mut Differences,
    ) -> Result<Self> {
        let of_pipe: BTreeMap<&str, &Tensor> =
            local.parameters().into_iter().filter(|(_, tensor)| tensor.is_variable()).collect();
        let of_plain: BTreeMap<&str, &Tensor> = plain
            .iter()
            .filter(|(_, t)| t.is_variable())
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect();
        for name in of_pipe.keys().filter(|name| !of_plain.contains_key(*name)) {
            found.add(format!("the parameter {name} is only in the pipe"));
        }
        let mut pairs = Vec::new();
        for (name, plain) in of_plain {
            match of_pipe.get(name) {
                None => found.add(format!("the parameter {name} is only in the plain model")),
                Some(&pipe) => {
                    if pipe.id() != plain.id() {
                        found.tensors(&format!("the parameter {name}"), pipe, plain)?;
                    }
                    pairs.push((name.to_owned(), pipe.id(), plain.id()));
                }
            }
        }
        // Variables that the model has from elsewhere are the same for both.
        let named: HashSet<TensorId> = plain.iter().map(|(_, tensor)| tensor.id()).collect();
        for &id in want.get_ids().filter(|id| !named.contains(id)) {
            let shape = want.get_id(id).map(|grad| format!("{:?}", grad.dims())).unwrap_or_default();
            pairs.push((format!("a variable of shape {shape}"), id, id));
        }
        Ok(Self(pairs))
    }

    fn compare(
        &self,
        got: &GradStore,
        want: &GradStore,
        have_loss: bool,
        found: &mut Differences,
    ) -> Result<()> {
        for (name, pipe, plain) in self.0.iter().filter(|_| have_loss) {
            let what = format!("the gradient of {name}");
            match (got.get_id(*pipe), want.get_id(*plain)) {
                (Some(got), Some(want)) => found.tensors(&what, got, want)?,
                (Some(got), None) => found.tensors(&what, got, &got.zeros_like()?)?,
                (None, Some(want)) => found.tensors(&what, &want.zeros_like()?, want)?,
                (None, None) => {}
            }
        }
        Ok(())
    }
}

/// The differences found so far.
struct Differences {
    tolerance: f64,
    texts: Vec<String>,
}

impl Differences {
    fn add(&mut self, text: String) {
        self.texts.push(text);
    }

    fn values(&mut self, what: &str, got: &Value, want: &Value) -> Result<()> {
        let (got, want) = (got.leaves(&ValuePath::new(what)), want.leaves(&ValuePath::new(what)));
        if !got.iter().map(|(path, _)| path).eq(want.iter().map(|(path, _)| path)) {
            self.add(format!("{what} has another structure"));
            return Ok(());
        }
        for ((path, got), (_, want)) in got.into_iter().zip(want) {
            match (got.full_tensor(), want.full_tensor()) {
                (Ok(got), Ok(want)) => self.tensors(&path.to_string(), &got, &want)?,
                _ if got.same(want)? => {}
                _ => self.add(format!("{path} is {got}, the plain model's {want}")),
            }
        }
        Ok(())
    }

    fn tensors(&mut self, what: &str, got: &Tensor, want: &Tensor) -> Result<()> {
        if got.dims() != want.dims() {
            let (got, want) = (Value::from(got), Value::from(want));
            self.add(format!("{what} is {got}, the plain model's {want}"));
            return Ok(());
        }
        let numbers =
            |t: &Tensor| -> Result<Vec<f64>> { Ok(t.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?) };
        let (got, want) = (numbers(got)?, numbers(want)?);
        let size = want.iter().fold(1.0, |size: f64, number| size.max(number.abs()));
        // Equality covers infinities, and a NaN in both models is not a difference.
        let off = |(got, want): (&f64, &f64)| match got == want || got.is_nan() && want.is_nan() {
            true => 0.0,
            false => Some((got - want).abs()).filter(|off| !off.is_nan()).unwrap_or(f64::INFINITY),
        };
        let off = got.iter().zip(&want).map(off).fold(0.0, f64::max);
        if off > self.tolerance * size || off.is_infinite() {
            self.add(format!("{what} is off by {off:e}, at numbers of up to {size:e}"));
        }
        Ok(())
    }

    fn into_result(self) -> Result<()> {
        if self.texts.is_empty() {
            return Ok(());
        }
        let more = self.texts.len().saturating_sub(LISTED);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        let listed = self.texts[..self.texts.len().min(LISTED)].join("; ");
        Err(Error::Pipe(format!("the pipe is not the plain model: {listed}{more}")))
    }
}
