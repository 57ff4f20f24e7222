//! A list of candle's modules as nodes.
use super::PipeBuilder;
use crate::graph::{NamedTensors, Node, NodeKind, Scope, ValueId};
use crate::nn::Sequential;
use crate::pipe::build::{BuildContext, BuiltNode, Factory, NodeBuilder};
use crate::{Error, Result};
use candle_core::{Tensor, TensorId, Var};
use candle_dist::bits::same_bits;
use candle_nn::ModuleT;
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;

/// Built modules that are not nodes yet, each with its parameters.
struct LayerList(RefCell<Vec<Option<NamedModule>>>);

/// A module and its parameters.
type NamedModule = (Box<dyn ModuleT>, NamedTensors);

impl<B: Scope> PipeBuilder<B> {
    /// Declares a list of `count` candle modules, as its own constructor builds it: nodes `name.0`, `name.1` and so on.
    /// The model may be cut between any two.
    ///
    /// `build` makes a [`Sequential`] or a `Vec<Box<dyn ModuleT>>` from the surrounding scope, not from one named
    /// `name`. It runs on every rank, which keeps the modules of its own stages. If a rank cannot hold all of them for
    /// a moment, use [`sequential`](Self::sequential), which builds them one by one. `example`, for which one row is
    /// enough, runs through the modules once in evaluation mode, to find the variables of each. If some have no
    /// gradient, such as the statistics of a batch norm, it also runs in training, and they get their values again. Tensors
    /// that are not variables belong to no node.
    ///
    /// Errors of `build` or of the run with `example`, and a wrong `count`, are returned when stages are built.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{VarBuilder, VarMap, linear};
    /// use candle_pipe::nn::{Sequential, seq};
    /// use candle_pipe::{EqualCount, In, LocalPipe, PipeBuilder};
    ///
    /// /// The model before it became a pipe, except for the import of `seq`.
    /// fn model(vb: &VarBuilder<'static>) -> candle_core::Result<Sequential> {
    ///     Ok(seq().add(linear(2, 3, vb.pp("up"))?).add_fn(|x| x.relu()).add(linear(3, 1, vb.pp("down"))?))
    /// }
    ///
    /// let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    /// let x = g.input("x", In::Arg);
    /// let y = g.layers("layers", 3, &Tensor::zeros((1, 2), DType::F32, &Device::Cpu)?, |vb| Ok(model(vb)?), x);
    /// g.output("y", y);
    /// let pipe = g.finish(EqualCount(2))?;
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let last = pipe.build_stage(1, &vb, &Device::Cpu)?;
    /// assert_eq!(last.parameters().keys().collect::<Vec<_>>(), ["down.bias", "down.weight"]);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn layers<L: Into<Sequential>>(
        &mut self,
        name: &str,
        count: usize,
        example: &Tensor,
        build: impl Fn(&B) -> Result<L> + Send + Sync + 'static,
        input: ValueId,
    ) -> ValueId {
        if count == 0 {
            self.fail(format!("the list {:?} has no modules; leave it out", self.full(name)));
        }
        let (build, example, scope) = (Arc::new(build), example.detach(), self.path.join("."));
        // The value of the first node's result stands for the list.
        let (id, list) = (ValueId(self.values), self.full(name));
        let mut value = input;
        for place in 0..count {
            let node = format!("{list}.{place}");
            let (build, example, list) = (build.clone(), example.clone(), list.clone());
            let make: Factory<B> = Arc::new(move |scope: &B, workshop: &BuildContext| {
                let layers = match workshop.get::<LayerList>(id) {
                    Some(layers) => layers,
                    None => {
                        let (made, named) = scope.watch(|scope| {
                            let list: Sequential = build(scope)?.into();
                            Ok(list.into_layers())
                        })?;
                        if let Some((name, _)) =
                            named.iter().find(|(_, t)| workshop.is_measuring && !t.track_op())
                        {
                            return Err(Error::Pipe(format!(
                                "which module of the list {list:?} has {name:?} is not known, as that is no variable; measure \
                                 with a builder of variables, such as one of a VarMap"
                            )));
                        }
                        let made = Rc::new(LayerList::new(&list, count, made, &named, &example)?);
                        workshop.put(id, made.clone());
                        made
                    }
                };
                let taken = layers.0.borrow_mut().get_mut(place).and_then(Option::take);
                let (layer, named) = taken.ok_or_else(|| {
                    Error::Pipe(format!(
                        "module {place} of the list {list:?} is built twice; build a stage once at a time"
                    ))
                })?;
                Ok(BuiltNode::with(Sequential::from(vec![layer]), named))
            });
            let output = self.value();
            let (kind, inputs) = (NodeKind::Module, vec![value]);
            self.graph.nodes.push(Node { name: node, kind, inputs, outputs: vec![output], weight: None });
            self.recipes.push(NodeBuilder { scope: Some(scope.clone()), make });
            value = output;
        }
        value
    }
}

impl LayerList {
    /// Finds the variables of each module.
    fn new(
        list: &str,
        count: usize,
        modules: Vec<Box<dyn ModuleT>>,
        named: &[(String, Tensor)],
        example: &Tensor,
    ) -> Result<Self> {
        if modules.len() != count {
            let made = modules.len();
            return Err(Error::Pipe(format!(
                "the list {list:?} has {made} modules, declared with {count}; declare {made}"
            )));
        }
        let device = named.first().map_or(example.device(), |(_, tensor)| tensor.device());
        let mut x = example.to_device(device)?;
        let mut layers = Vec::with_capacity(count);
        let mut inputs = Vec::with_capacity(count);
        let mut found = HashSet::new();
        for (place, module) in modules.into_iter().enumerate() {
            let y = module
                .forward_t(&x, false)
                .map_err(|error| Error::from(error).at_node(&format!("{list}.{place}")))?;
            let used: HashSet<TensorId> = y.sorted_nodes().into_iter().map(Tensor::id).collect();
            let own: NamedTensors =
                named.iter().filter(|(_, tensor)| used.contains(&tensor.id())).cloned().collect();
            found.extend(own.iter().map(|(_, tensor)| tensor.id()));
            layers.push((module, own));
            inputs.push(std::mem::replace(&mut x, y.detach()));
        }
        let is_lost = |(_, tensor): &&(String, Tensor)| tensor.track_op() && !found.contains(&tensor.id());
        // A cast cannot be tried, because nothing writes to it.
        let lost: NamedTensors = named.iter().filter(is_lost).cloned().collect();
        let (mut lost, casts): (NamedTensors, NamedTensors) =
            lost.into_iter().partition(|(_, tensor)| tensor.is_variable());
        // Those without a gradient, such as the statistics of a batch norm, belong to the module that moves them.
        for ((module, own), x) in layers.iter_mut().zip(&inputs) {
            if lost.is_empty() {
                break;
            }
            let (moved, left) = moved_by(&**module, x, lost)?;
            own.extend(moved);
            lost = left;
        }
        let layers = layers.into_iter().map(Some).collect();
        let lost = lost.first().or(casts.first());
        match lost {
            None => Ok(Self(RefCell::new(layers))),
            Some((name, _)) => Err(Error::Pipe(format!(
                "no module of the list {list:?} has a gradient of {name:?}, and none changes it in training: it uses the \
                 variable in no output, or through an operation of candle without a backward pass, such as a fused norm; \
                 leave it out, or replace the module"
            ))),
        }
    }
}

/// Returns the variables that a module changes in training, and the others. All have their values again.
fn moved_by(
    module: &dyn ModuleT,
    x: &Tensor,
    variables: NamedTensors,
) -> Result<(NamedTensors, NamedTensors)> {
    // Not their own values: a mean of 0 stays 0 on an example of zeros.
    let trial = |variable: &Tensor| match variable.dtype().is_float() {
        true => variable.ones_like()?.affine(0.731, 0.0),
        false => variable.ones_like(),
    };
    let mut kept = Vec::with_capacity(variables.len());
    for (_, variable) in &variables {
        let (own, trial) = (variable.detach().force_contiguous()?, trial(variable)?);
        Var::from_tensor(variable)?.set(&trial)?;
        kept.push((own, trial));
    }
    // A module that refuses the example in training moves nothing.
    drop(module.forward_t(x, true));
    let (mut moved, mut left) = (NamedTensors::new(), NamedTensors::new());
    for (named, (own, trial)) in variables.into_iter().zip(kept) {
        let is_moved = !same_bits(&named.1.detach(), &trial)?;
        Var::from_tensor(&named.1)?.set(&own)?;
        if is_moved { moved.push(named) } else { left.push(named) }
    }
    Ok((moved, left))
}
