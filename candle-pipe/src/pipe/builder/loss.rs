//! Declaration of the loss.
use super::PipeBuilder;
use crate::graph::{Ctx, Loss, LossReduction, Scope, ValueId};
use crate::microbatch::ChunkSpec;
use crate::pipe::loss::{LossSpec, NAME, reduction};
use crate::pipe::pick;
use crate::{Result, Value, ValuePath};
use candle_core::Tensor;

impl<B: Scope> PipeBuilder<B> {
    /// Declares the loss: a value that is a scalar of floats, or for [`LossReduction::Counted`] a tuple of such a scalar
    /// and its count, a number or a one-element tensor.
    pub fn loss(&mut self, value: ValueId, reduction: LossReduction) {
        if self.graph.loss.replace(Loss { value, reduction }).is_some() {
            self.fail("the model has two losses; add them up in a function".into());
        }
    }

    /// Declares the loss as a function of outputs and targets, a node named `loss`.
    pub fn loss_fn(
        &mut self,
        f: impl Fn(&[Value], &Ctx) -> Result<Tensor> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
        reduction: LossReduction,
    ) -> ValueId {
        if reduction == LossReduction::Counted {
            self.fail(
                "loss_fn gives one tensor, and a loss that counts is a sum and a count; use loss_counted"
                    .into(),
            );
        }
        let loss = self.func(NAME, move |xs, ctx| Ok(f(xs, ctx)?.into()), inputs);
        self.loss(loss, reduction);
        loss
    }

    /// Declares the loss as a sum and a count, a node named `loss`. A mean over valid tokens, whose numbers differ
    /// between microbatches and replicas, equals that of one device.
    ///
    /// The count is a constant: a training step refuses one that has a gradient, such as a sum of weights that the model
    /// computes.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_pipe::microbatch::Microbatches;
    /// use candle_pipe::{In, LocalPipe, PipeBuilder, SplitSpec, StepOptions};
    ///
    /// let mut g = PipeBuilder::<()>::new();
    /// let (x, is_valid) = (g.input("x", In::Arg), g.input("is_valid", In::Arg));
    /// let y = g.func("square", |xs, _| Ok(xs[0].tensor()?.sqr()?.into()), [x]);
    /// g.loss_counted(
    ///     |xs, _| {
    ///         let (y, is_valid) = (xs[0].tensor()?, xs[1].tensor()?);
    ///         Ok(((y * is_valid)?.sum_all()?, is_valid.sum_all()?.into()))
    ///     },
    ///     [y, is_valid],
    /// );
    /// let local = LocalPipe::new(&g.finish(SplitSpec::declared())?, &(), &Device::Cpu)?;
    /// let x = Tensor::new(&[1f32, 2., 3., 4.], &Device::Cpu)?;
    /// let is_valid = Tensor::new(&[1f32, 1., 1., 0.], &Device::Cpu)?;
    /// let batch = Microbatches::cut(2, [x, is_valid])?;
    /// assert_eq!(local.evaluate(&batch, &StepOptions::default())?.loss()?.to_scalar::<f32>()?, 14.0 / 3.0);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn loss_counted(
        &mut self,
        f: impl Fn(&[Value], &Ctx) -> Result<(Tensor, Value)> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> ValueId {
        let loss = self.func(NAME, move |xs, ctx| Ok(f(xs, ctx)?.into()), inputs);
        self.loss(loss, LossReduction::Counted);
        loss
    }

    /// Declares the loss as an element of a value, such as `.losses[0]` or `[1].main`, a node named `loss`.
    pub fn loss_at(&mut self, value: ValueId, path: &str, reduction: LossReduction) -> ValueId {
        match pick::ElementPath::parse(path) {
            Ok(steps) => {
                let loss = self.func(NAME, move |xs, _| Ok(steps.pick(&xs[0])?.clone()), [value]);
                self.loss(loss, reduction);
                loss
            }
            Err(error) => {
                self.error.get_or_insert(error);
                value
            }
        }
    }

    /// Declares the loss by a tree of booleans over the [outputs](Self::output), which may be declared before or after.
    /// A node named `loss` picks a loss within a value, and checks that the value has the structure of the spec.
    ///
    /// `false` means that the model has no loss, even if an output is named `loss`. [`finish`](Self::finish) checks the
    /// spec against the declared outputs: names, numbers, and that there is one loss.
    ///
    /// ```
    /// use candle_pipe::{In, PipeBuilder, LossReduction, SplitSpec};
    /// use std::collections::BTreeMap;
    ///
    /// let declare = || {
    ///     let mut g = PipeBuilder::<()>::new();
    ///     let x = g.input("x", In::Arg);
    ///     let square = |xs: &[candle_pipe::Value], _: &_| {
    ///         let y = xs[0].tensor()?.sqr()?;
    ///         Ok([y.clone().into(), (y.sum_all()?, "sum of squares").into()])
    ///     };
    ///     let [y, result] = g.func_many("square", square, [x]);
    ///     g.output("y", y);
    ///     g.output("result", result);
    ///     g
    /// };
    /// let mut g = declare();
    /// g.loss_spec((false, (true, false)), LossReduction::Sum);
    /// let pipe = g.finish(SplitSpec::declared())?;
    /// assert_eq!(pipe.info().graph.value_name(pipe.info().graph.loss.expect("a loss").value), "loss");
    ///
    /// let mut g = declare();
    /// g.loss_spec(BTreeMap::from([("y", false), ("results", true)]), LossReduction::Sum);
    /// let error = g.finish(SplitSpec::declared()).unwrap_err().to_string();
    /// assert!(error.contains(r#"names "results", which is not one of the outputs [y, result]"#), "{error}");
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn loss_spec(&mut self, spec: impl Into<LossSpec>, reduction: LossReduction) {
        if self.loss_spec.replace((spec.into(), reduction)).is_some() {
            self.fail(TWICE.into());
        }
    }

    /// Declares the loss by the position of the [`LossReducer`](crate::microbatch::LossReducer) in the spec that joins
    /// the outputs of microbatches, with that reducer's reduction; otherwise like [`loss_spec`](Self::loss_spec).
    pub fn loss_by_reducer(&mut self, outputs: &ChunkSpec) {
        match reduction(outputs) {
            Ok(reduction) => self.loss_spec(outputs, reduction),
            Err(error) => _ = self.error.get_or_insert(error),
        }
    }

    /// Finds the loss among the outputs.
    pub(super) fn find_loss(&mut self) {
        let Some((spec, reduction)) = self.loss_spec.take() else {
            let named =
                self.graph.outputs.iter().find(|output| output.name == NAME).map(|output| output.value);
            if let (None, Some(value)) = (self.graph.loss, named) {
                self.graph.loss = Some(Loss { value, reduction: LossReduction::Mean });
            }
            return;
        };
        let found = spec.find(&self.graph.outputs);
        let found = found.map(|found| found.map(|(out, inner)| (out.name.clone(), out.value, inner.clone())));
        let (name, value, inner) = match found {
            Err(error) => {
                self.error.get_or_insert(error);
                return;
            }
            Ok(None) if self.graph.loss.is_some() => return self.fail(TWICE.into()),
            Ok(None) => return,
            Ok(Some(found)) => found,
        };
        if inner == LossSpec::Is(true) {
            return self.loss(value, reduction);
        }
        let path = ValuePath::new(name);
        let loss = self.func(NAME, move |xs, _| inner.pick(&path, &xs[0]).cloned(), [value]);
        self.loss(loss, reduction);
    }
}

const TWICE: &str = "the loss is declared twice; leave one out";
