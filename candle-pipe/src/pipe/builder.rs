//! Declaring a model.
use super::{Pipe, pick};
use crate::graph::{
    Ctx, Graph, In, Input, Loss, Node, NodeKind, Output, Reduction, Scope, Share, SplitSpec, StageOp, ValueId, stage_op,
};
use crate::{Error, Result, Value};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// Makes a node's computation where the node runs, from the node's own scope.
pub(super) type Factory<B> = Arc<dyn Fn(&B) -> Result<Rc<dyn StageOp>> + Send + Sync>;

/// One layer of a [`sequential`](PipeBuilder::sequential) model: its name, and what makes it.
pub type Layer<'a, B> = (&'a str, Box<dyn Fn(&B) -> Result<Box<dyn StageOp>> + Send + Sync>);

/// A part of a model that declares nodes of its own, so that a model can be cut within it.
pub trait PipeModule<B: Scope> {
    /// Declares the nodes and returns the part's results.
    fn build(&self, pipe: &mut PipeBuilder<B>, inputs: &[ValueId]) -> Vec<ValueId>;
}

/// Declares a model as a graph of named nodes, of which [`finish`](Self::finish) makes a [`Pipe`].
///
/// Constructors of modules run only where a stage is built, with the scope of the node's name: what is built is called
/// as in the uncut model. What is wrong with a declaration comes out of `finish`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_pipe::{In, Kwargs, LocalPipe, PipeBuilder, Reduction, SplitPoint, SplitSpec};
///
/// let mut g = PipeBuilder::<VarBuilder<'static>>::new();
/// let x = g.input("x", In::Arg);
/// let target = g.input("target", In::Kwarg); // used by the last stage, wherever that is
/// let h = g.module("up", |vb| Ok(candle_nn::linear(2, 8, vb.clone())?), [x]);
/// let a = g.func("relu", |xs, _| Ok(xs[0].tensor()?.relu()?.into()), [h]);
/// let y = g.module("down", |vb| Ok(candle_nn::linear(8, 2, vb.clone())?), [a]);
/// let y = g.func("skip", |xs, _| Ok((xs[0].tensor()? + xs[1].tensor()?)?.into()), [y, x]);
/// g.output("y", y);
/// g.loss_fn(|xs, _| Ok(candle_nn::loss::mse(xs[0].tensor()?, xs[1].tensor()?)?), [y, target], Reduction::Mean);
/// let pipe = g.finish(SplitSpec::at([("down", SplitPoint::Beginning)]))?;
/// assert_eq!(pipe.num_stages(), 2);
///
/// let parameters = VarMap::new();
/// let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
/// let local = LocalPipe::new(&pipe, &vb, &Device::Cpu)?;
/// let x = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
/// let outputs = local.forward(&[x.clone().into()], &Kwargs::from([("target".into(), x.into())]))?;
/// assert_eq!(outputs["y"].tensor()?.dims(), [3, 2]);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
pub struct PipeBuilder<B> {
    graph: Graph,
    factories: Vec<Factory<B>>,
    defaults: BTreeMap<ValueId, Value>,
    path: Vec<String>,
    values: usize,
    /// The first thing that went wrong.
    error: Option<Error>,
}

impl<B: Scope> PipeBuilder<B> {
    /// A model without nodes.
    pub fn new() -> Self {
        let (graph, factories, defaults, path) = Default::default();
        Self { graph, factories, defaults, path, values: 0, error: None }
    }

    /// An input, for any nodes of any stage: data, masks, labels, plain values.
    pub fn input(&mut self, name: impl Into<String>, kind: In) -> ValueId {
        let value = self.value();
        self.graph.inputs.push(Input { name: name.into(), kind, optional: false, value });
        value
    }

    /// An input by name that callers may leave out.
    pub fn input_or(&mut self, name: impl Into<String>, default: impl Into<Value>) -> ValueId {
        let value = self.value();
        self.graph.inputs.push(Input { name: name.into(), kind: In::Kwarg, optional: true, value });
        self.defaults.insert(value, default.into());
        value
    }

    /// A module with one result.
    pub fn module<M: StageOp + 'static>(
        &mut self,
        name: &str,
        build: impl Fn(&B) -> Result<M> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> ValueId {
        let [value] = self.module_many(name, build, inputs);
        value
    }

    /// A module with several results, as many as the pattern that takes them: `let [a, b] = g.module_many(..)`.
    pub fn module_many<M: StageOp + 'static, const N: usize>(
        &mut self,
        name: &str,
        build: impl Fn(&B) -> Result<M> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> [ValueId; N] {
        let factory: Factory<B> = Arc::new(move |scope| Ok(Rc::new(build(scope)?)));
        self.node(name, NodeKind::Module, factory, inputs)
    }

    /// A function with one result.
    pub fn func(
        &mut self,
        name: &str,
        f: impl Fn(&[Value], &Ctx) -> Result<Value> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> ValueId {
        let [value] = self.func_many(name, move |xs, ctx| Ok([f(xs, ctx)?]), inputs);
        value
    }

    /// A function with several results.
    pub fn func_many<const N: usize>(
        &mut self,
        name: &str,
        f: impl Fn(&[Value], &Ctx) -> Result<[Value; N]> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> [ValueId; N] {
        let f = Arc::new(f);
        let factory: Factory<B> = Arc::new(move |_| {
            let f = f.clone();
            Ok(Rc::new(stage_op(move |xs, ctx| Ok(f(xs, ctx)?.into()))))
        });
        self.node(name, NodeKind::Function, factory, inputs)
    }

    /// A parameter that any nodes use, in any stages; `name` is its full name, and `build` gets the scope of its module.
    ///
    /// For a weight that an embedding and an output layer have in common. See [`Share`] for where it lives.
    pub fn parameter(
        &mut self,
        name: &str,
        share: Share,
        build: impl Fn(&B) -> Result<Tensor> + Send + Sync + 'static,
    ) -> ValueId {
        let factory: Factory<B> = Arc::new(move |scope| {
            let parameter = build(scope)?;
            Ok(Rc::new(stage_op(move |_, _| Ok(vec![parameter.clone().into()]))))
        });
        let [value] = self.node(name, NodeKind::Parameter(share), factory, []);
        value
    }

    /// Layers one behind the other, with a cut between any two.
    pub fn sequential<'a>(&mut self, layers: impl IntoIterator<Item = Layer<'a, B>>, input: ValueId) -> ValueId {
        let mut value = input;
        for (i, (name, build)) in layers.into_iter().enumerate() {
            if i > 0 {
                self.split();
            }
            let factory: Factory<B> = Arc::new(move |scope| Ok(Rc::from(build(scope)?)));
            [value] = self.node(name, NodeKind::Module, factory, [value]);
        }
        value
    }

    /// A part of the model under a name of its own.
    pub fn nested(
        &mut self,
        name: &str,
        part: &impl PipeModule<B>,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> Vec<ValueId> {
        let inputs = Vec::from_iter(inputs);
        self.scope(name, |g| part.build(g, &inputs))
    }

    /// What `declare` declares, with `name` before the names of nodes.
    pub fn scope<R>(&mut self, name: &str, declare: impl FnOnce(&mut Self) -> R) -> R {
        self.path.push(name.into());
        let result = declare(self);
        self.path.pop();
        result
    }

    /// Cuts the model here: the next node begins a stage.
    pub fn split(&mut self) {
        self.graph.splits.push(self.graph.nodes.len());
    }

    /// A result of the model.
    pub fn output(&mut self, name: impl Into<String>, value: ValueId) {
        self.graph.outputs.push(Output { name: name.into(), value });
    }

    /// The loss: a value that is a scalar of floats, or for [`Reduction::Counted`] a tuple of one and its count, which is a
    /// number or a tensor of one.
    pub fn loss(&mut self, value: ValueId, reduction: Reduction) {
        if self.graph.loss.replace(Loss { value, reduction }).is_some() {
            self.fail("the model has two losses; add them up in a function".into());
        }
    }

    /// The loss as a function of outputs and targets, a node named `loss`.
    pub fn loss_fn(
        &mut self,
        f: impl Fn(&[Value], &Ctx) -> Result<Tensor> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
        reduction: Reduction,
    ) -> ValueId {
        let loss = self.func("loss", move |xs, ctx| Ok(f(xs, ctx)?.into()), inputs);
        self.loss(loss, reduction);
        loss
    }

    /// The loss as a sum and the count of what it adds up, a node named `loss`: a mean over valid tokens, of which
    /// microbatches and replicas have unequal numbers, is that of one device.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_pipe::microbatch::split_args_kwargs_into_chunks;
    /// use candle_pipe::{In, Kwargs, LocalPipe, PipeBuilder, SplitSpec};
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
    /// let batch = split_args_kwargs_into_chunks(&[x.into(), is_valid.into()], &Kwargs::new(), 2, None, None)?;
    /// assert_eq!(local.evaluate(&batch)?.loss()?.to_scalar::<f32>()?, 14.0 / 3.0);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn loss_counted(
        &mut self,
        f: impl Fn(&[Value], &Ctx) -> Result<(Tensor, Value)> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> ValueId {
        let loss = self.func("loss", move |xs, ctx| Ok(f(xs, ctx)?.into()), inputs);
        self.loss(loss, Reduction::Counted);
        loss
    }

    /// The loss as a place in a value, such as `.losses[0]` or `[1].main`, a node named `loss`.
    pub fn loss_at(&mut self, value: ValueId, path: &str, reduction: Reduction) -> ValueId {
        match pick::Steps::parse(path) {
            Ok(steps) => {
                let loss = self.func("loss", move |xs, _| Ok(steps.pick(&xs[0])?.clone()), [value]);
                self.loss(loss, reduction);
                loss
            }
            Err(error) => {
                self.error.get_or_insert(error);
                value
            }
        }
    }

    /// Builds every node once, and drops it, to learn the number of its parameters' elements.
    ///
    /// For the policies that cut by them. With [`shapes_only`](crate::shapes_only), nothing is read or allocated. A
    /// `ShardedVarBuilder` gives each parameter once; measure with one of its own.
    ///
    /// # Errors
    /// Those of the constructors.
    pub fn measure(&mut self, scope: &B) -> Result<()> {
        for (node, factory) in self.graph.nodes.iter_mut().zip(&self.factories) {
            let (_, named) = super::build::build(node, factory, scope)?;
            node.weight = Some(named.iter().map(|(_, tensor)| tensor.elem_count()).sum());
        }
        Ok(())
    }

    /// The model as declared so far, as plain data.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The model, cut into stages.
    ///
    /// # Errors
    /// [`Error::Pipe`] for what is wrong with the declaration, what [`Graph::check`] finds, or where it cannot be cut.
    pub fn finish(self, split: impl Into<SplitSpec>) -> Result<Pipe<B>> {
        match self.error {
            Some(error) => Err(error),
            None => Pipe::new(self.graph, self.factories, self.defaults, &split.into()),
        }
    }

    fn node<const N: usize>(
        &mut self,
        name: &str,
        kind: NodeKind,
        factory: Factory<B>,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> [ValueId; N] {
        let name = self.path.iter().map(String::as_str).chain([name]).collect::<Vec<_>>().join(".");
        let outputs = std::array::from_fn(|_| self.value());
        let inputs = Vec::from_iter(inputs);
        self.graph.nodes.push(Node { name, kind, inputs, outputs: outputs.to_vec(), weight: None });
        self.factories.push(factory);
        outputs
    }

    fn value(&mut self) -> ValueId {
        self.values += 1;
        ValueId(self.values - 1)
    }

    fn fail(&mut self, reason: String) {
        self.error.get_or_insert(Error::Pipe(reason));
    }
}

impl<B: Scope> Default for PipeBuilder<B> {
    fn default() -> Self {
        Self::new()
    }
}
