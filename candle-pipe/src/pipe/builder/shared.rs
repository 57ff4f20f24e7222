//! Modules that several nodes share.
use super::PipeBuilder;
use crate::graph::{Ctx, NodeKind, Scope, StageOp, ValueId, stage_op};
use crate::pipe::build::{BuildContext, BuiltNode, Factory};
use crate::{Error, Result, Value};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

/// A module that several nodes share, in any stages. [`PipeBuilder::shared_module`] declares it.
pub struct SharedModule<M> {
    /// The value that stands for the module among the inputs of those nodes.
    value: ValueId,
    module: PhantomData<fn() -> M>,
}

impl<M> Clone for SharedModule<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for SharedModule<M> {}

impl<B: Scope> PipeBuilder<B> {
    /// Declares a module that nodes share; declare each node by [`call`](Self::call) or [`call_with`](Self::call_with).
    ///
    /// It is built, under its own name, in every stage that has such a node. The gradients of its parameters are summed
    /// over the stages once, as with [`Share::Replicate`](crate::Share::Replicate).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Linear, VarBuilder, VarMap};
    /// use candle_pipe::{EqualCount, In, Kwargs, LocalPipe, PipeBuilder};
    ///
    /// let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    /// let x = g.input("x", In::Arg);
    /// let layer = g.shared_module("layer", |vb| Ok(candle_nn::linear(2, 3, vb.clone())?));
    /// let h = g.call(layer, "up", [x]);
    /// let back = |layer: &Linear, xs: &[candle_pipe::Value], _: &_| {
    ///     Ok(xs[0].tensor()?.matmul(layer.weight())?.into())
    /// };
    /// let y = g.call_with(layer, "down", back, [h]);
    /// g.output("y", y);
    /// let pipe = g.finish(EqualCount(2))?;
    /// assert_eq!(pipe.shares()[0].stages, [0, 1]);
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let local = LocalPipe::new(&pipe, &vb, &Device::Cpu)?;
    /// assert_eq!(local.parameters().into_keys().collect::<Vec<_>>(), ["layer.bias", "layer.weight"]);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn shared_module<M: 'static>(
        &mut self,
        name: &str,
        build: impl Fn(&B) -> Result<M> + Send + Sync + 'static,
    ) -> SharedModule<M> {
        // Its own value, the same as the node's.
        let id = ValueId(self.values);
        let make: Factory<B> = Arc::new(move |scope, workshop| {
            workshop.put(id, Rc::new(build(scope)?));
            Ok(BuiltNode::of(stage_op(|_, _| Ok(vec![Value::None]))))
        });
        let [value] = self.node(name, NodeKind::Shared, make, []);
        SharedModule { value, module: PhantomData }
    }

    /// Declares a node that applies a shared module, with one result.
    pub fn call<M: StageOp + 'static>(
        &mut self,
        module: SharedModule<M>,
        name: &str,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> ValueId {
        let inputs = Vec::from_iter(inputs);
        if let Some((takes, _)) = M::arity().filter(|&arity| arity != (inputs.len(), 1)) {
            let (name, given) = (self.full(name), inputs.len());
            let reason =
                format!("node {name:?} calls a module that takes {takes} tensor with {given} inputs");
            self.fail(format!("{reason}; use call_with"));
        }
        let f = |module: &M, xs: &[Value], ctx: &Ctx| match <[Value; 1]>::try_from(module.forward(xs, ctx)?) {
            Ok([value]) => Ok(value),
            Err(values) => {
                let given = values.len();
                Err(Error::Pipe(format!(
                    "{given} values of a shared module where one is declared; use call_with"
                )))
            }
        };
        self.call_with(module, name, f, inputs)
    }

    /// Declares a node that computes with a shared module, such as logits with the table of an embedding.
    pub fn call_with<M: 'static>(
        &mut self,
        module: SharedModule<M>,
        name: &str,
        f: impl Fn(&M, &[Value], &Ctx) -> Result<Value> + Send + Sync + 'static,
        inputs: impl IntoIterator<Item = ValueId>,
    ) -> ValueId {
        let (f, id) = (Arc::new(f), module.value);
        let make = move |_: &B, workshop: &BuildContext| {
            let foreign =
                || Error::Pipe("the shared module is one of another model; declare it in this one".into());
            let (module, f) = (workshop.get::<M>(id).ok_or_else(foreign)?, f.clone());
            // The first input stands for the module.
            Ok(BuiltNode::of(stage_op(move |xs, ctx| Ok(vec![f(&module, &xs[1..], ctx)?]))))
        };
        let [value] = self.node(name, NodeKind::Function, Arc::new(make), [id].into_iter().chain(inputs));
        value
    }
}
