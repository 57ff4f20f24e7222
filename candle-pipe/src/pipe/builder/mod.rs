//! Declaration of a model.
mod layers;
mod loss;
mod shared;

pub use shared::SharedModule;

use super::Pipe;
use super::build::{BuildContext, BuiltNode, Factory, NodeBuilder, build};
use super::loss::LossSpec;
use crate::graph::{
    Ctx, Graph, In, Input, LossReduction, Node, NodeKind, Output, Scope, Share, SplitSpec, StageOp, ValueId,
    stage_op,
};
use crate::{Error, Result, Value};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One layer of a [`sequential`](PipeBuilder::sequential) model: its name and its constructor.
pub type Layer<'a, B> = (&'a str, Box<dyn Fn(&B) -> Result<Box<dyn StageOp>> + Send + Sync>);

/// A part of a model that declares its own nodes, so that a model can be cut within it.
pub trait PipeModule<B: Scope> {
    /// Declares the nodes and returns the part's results.
    fn build(&self, pipe: &mut PipeBuilder<B>, inputs: &[ValueId]) -> Vec<ValueId>;
}

/// Declares a model as a graph of named nodes; [`finish`](Self::finish) makes it a [`Pipe`].
///
/// Constructors of modules run only when a stage is built, with the scope of the node's name, so parameters have the
/// same names as in the uncut model. Errors of the declaration are returned by `finish`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use candle_pipe::{In, Kwargs, LocalPipe, PipeBuilder, LossReduction, SplitPoint, SplitSpec};
///
/// let mut g = PipeBuilder::<VarBuilder<'static>>::new();
/// let x = g.input("x", In::Arg);
/// let target = g.input("target", In::Kwarg); // used by the last stage, wherever that is
/// let h = g.module("up", |vb| Ok(candle_nn::linear(2, 8, vb.clone())?), [x]);
/// let a = g.func("relu", |xs, _| Ok(xs[0].tensor()?.relu()?.into()), [h]);
/// let y = g.module("down", |vb| Ok(candle_nn::linear(8, 2, vb.clone())?), [a]);
/// let y = g.func("skip", |xs, _| Ok((xs[0].tensor()? + xs[1].tensor()?)?.into()), [y, x]);
/// g.output("y", y);
/// g.loss_fn(|xs, _| Ok(candle_nn::loss::mse(xs[0].tensor()?, xs[1].tensor()?)?), [y, target], LossReduction::Mean);
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
    recipes: Vec<NodeBuilder<B>>,
    defaults: BTreeMap<ValueId, Value>,
    path: Vec<String>,
    values: usize,
    /// The spec of the loss, resolved when all outputs are known.
    loss_spec: Option<(LossSpec, LossReduction)>,
    /// The first error.
    error: Option<Error>,
}

impl<B: Scope> PipeBuilder<B> {
    /// Creates a model without nodes.
    pub fn new() -> Self {
        let (graph, recipes, defaults, path, loss_spec) = Default::default();
        Self { graph, recipes, defaults, path, values: 0, loss_spec, error: None }
    }

    /// Declares an input, for any nodes of any stage: data, masks, labels, plain values.
    pub fn input(&mut self, name: impl Into<String>, kind: In) -> ValueId {
        let value = self.value();
        self.graph.inputs.push(Input { name: name.into(), kind, optional: false, value });
        value
    }

    /// Declares an optional input that is passed by name.
    pub fn input_or(&mut self, name: impl Into<String>, default: impl Into<Value>) -> ValueId {
        let value = self.value();
        self.graph.inputs.push(Input { name: name.into(), kind: In::Kwarg, optional: true, value });
        self.defaults.insert(value, default.into());
        value
    }

    /// Declares an optional input that is passed by position or by name.
    pub fn input_arg_or(&mut self, name: impl Into<String>, default: impl Into<Value>) -> ValueId {
        let value = self.value();
        self.graph.inputs.push(Input { name: name.into(), kind: In::Arg, optional: true, value });
        self.defaults.insert(value, default.into());
        value
    }

    /// Declares a module with one result.
    pub fn module<M: StageOp + 'static>(
        &mut self,
        name: &str,
        build: impl Fn(&B) -> Result<M> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> ValueId {
        let [value] = self.module_many(name, build, inputs);
        value
    }

    /// Declares a module with several results; the pattern on the left says how many: `let [a, b] = g.module_many(..)`.
    pub fn module_many<M: StageOp + 'static, const N: usize>(
        &mut self,
        name: &str,
        build: impl Fn(&B) -> Result<M> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> [ValueId; N] {
        let inputs = Vec::from_iter(inputs);
        if let Some(arity) = M::arity().filter(|&arity| arity != (inputs.len(), N)) {
            let (given, (takes, gives)) = (inputs.len(), arity);
            let reason =
                format!("node {:?} is a module that takes {takes} tensor and gives {gives}", self.full(name));
            self.fail(format!("{reason}, declared with {given} inputs and {N} results; make it a stage_op"));
        }
        self.node(name, NodeKind::Module, Arc::new(move |scope, _| Ok(BuiltNode::of(build(scope)?))), inputs)
    }

    /// Declares a function with one result.
    pub fn func(
        &mut self,
        name: &str,
        f: impl Fn(&[Value], &Ctx) -> Result<Value> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> ValueId {
        let [value] = self.func_many(name, move |xs, ctx| Ok([f(xs, ctx)?]), inputs);
        value
    }

    /// Declares a function with several results.
    pub fn func_many<const N: usize>(
        &mut self,
        name: &str,
        f: impl Fn(&[Value], &Ctx) -> Result<[Value; N]> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> [ValueId; N] {
        let f = Arc::new(f);
        let make = move |_: &B, _: &BuildContext| {
            let f = f.clone();
            Ok(BuiltNode::of(stage_op(move |xs, ctx| Ok(f(xs, ctx)?.into()))))
        };
        self.node(name, NodeKind::Function, Arc::new(make), inputs)
    }

    /// Declares a parameter for any nodes in any stages. `name` is its full name; `build` gets the scope of its module.
    ///
    /// Use it for a weight that an embedding and an output layer share. See [`Share`] for its home.
    ///
    /// It is a tensor, or the `DTensor` of a `MeshVarBuilder`, which nodes get with its layout. A plain tensor that is made of
    /// such a parameter whose ranks have parts of it or of its gradient is refused when the stages are built: nodes could not know.
    pub fn parameter<P: Into<Value>>(
        &mut self,
        name: &str,
        share: Share,
        build: impl Fn(&B) -> Result<P> + Send + Sync + 'static,
    ) -> ValueId {
        let make = move |scope: &B, _: &BuildContext| {
            let parameter: Value = build(scope)?.into();
            if let Value::Tensor(plain) = &parameter {
                scope.check_plain(plain)?;
            }
            Ok(BuiltNode::of(stage_op(move |_, _| Ok(vec![parameter.clone()]))))
        };
        let [value] = self.node(name, NodeKind::Parameter(share), Arc::new(make), []);
        value
    }

    /// Declares a sequence of layers. The model may be cut between any two.
    pub fn sequential<'a>(
        &mut self,
        layers: impl IntoIterator<Item = Layer<'a, B>>,
        input: ValueId,
    ) -> ValueId {
        let mut value = input;
        for (i, (name, build)) in layers.into_iter().enumerate() {
            if i > 0 {
                self.split();
            }
            let make = move |scope: &B, _: &BuildContext| Ok(BuiltNode::boxed(build(scope)?));
            [value] = self.node(name, NodeKind::Module, Arc::new(make), [value]);
        }
        value
    }

    /// Declares a part of the model under its own name.
    pub fn nested(
        &mut self,
        name: &str,
        part: &impl PipeModule<B>,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> Vec<ValueId> {
        let inputs = Vec::from_iter(inputs);
        self.scope(name, |g| part.build(g, &inputs))
    }

    /// Runs `declare` with `name` as a prefix of the names of nodes.
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

    /// Declares a result of the model.
    pub fn output(&mut self, name: impl Into<String>, value: ValueId) {
        self.graph.outputs.push(Output { name: name.into(), value });
    }

    /// Builds every node once, and drops it, to count the elements of its parameters.
    ///
    /// Policies that cut by parameters need it. With [`shapes_only`](crate::shapes_only), nothing is read or allocated.
    /// A `MeshVarBuilder` keeps all parameters that it creates, so use a separate one to measure.
    ///
    /// # Errors
    /// Those of the constructors.
    pub fn measure(&mut self, scope: &B) -> Result<()> {
        let workshop = BuildContext::measuring();
        for (node, recipe) in self.graph.nodes.iter_mut().zip(&self.recipes) {
            let (_, named) = build(node, recipe, scope, &workshop)?;
            node.weight = Some(named.iter().map(|(_, tensor)| tensor.elem_count()).sum());
        }
        Ok(())
    }

    /// Returns the model as declared so far, as plain data.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Cuts the model into stages. If no loss is declared, an output named `loss` is the [loss](Self::loss), a
    /// [mean](LossReduction::Mean).
    ///
    /// # Errors
    /// [`Error::Pipe`] for errors of the declaration, those of [`Graph::check`], and those of the cut.
    pub fn finish(mut self, split: impl Into<SplitSpec>) -> Result<Pipe<B>> {
        self.find_loss();
        match self.error {
            Some(error) => Err(error),
            None => Pipe::new(self.graph, self.recipes, self.defaults, &split.into()),
        }
    }

    fn node<const N: usize>(
        &mut self,
        name: &str,
        kind: NodeKind,
        make: Factory<B>,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> [ValueId; N] {
        let name = self.full(name);
        let scope = match kind {
            NodeKind::Function => None,
            NodeKind::Module | NodeKind::Shared => Some(name.clone()),
            NodeKind::Parameter(_) => Some(name.rsplit_once('.').map_or("", |(module, _)| module).to_owned()),
        };
        let outputs = std::array::from_fn(|_| self.value());
        let inputs = Vec::from_iter(inputs);
        self.graph.nodes.push(Node { name, kind, inputs, outputs: outputs.to_vec(), weight: None });
        self.recipes.push(NodeBuilder { scope, make });
        outputs
    }

    /// Returns the full name of a node that is declared now.
    fn full(&self, name: &str) -> String {
        self.path.iter().map(String::as_str).chain([name]).collect::<Vec<_>>().join(".")
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
