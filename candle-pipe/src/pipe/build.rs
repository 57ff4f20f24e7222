//! Builds the nodes of one stage.
use crate::graph::{Ctx, NamedTensors, Node, NodeKind, Scope, StageOp, ValueId};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use candle_dist::TensorTree;
use candle_dist_kernels::random::Draws;
use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// Makes a node's computation on the rank that runs it, from the node's own scope.
pub(super) type Factory<B> = Arc<dyn Fn(&B, &BuildContext) -> Result<BuiltNode> + Send + Sync>;

/// How a node is built.
pub(super) struct NodeBuilder<B> {
    /// The path of the scope of the node's parameters; `None` for a function, which has none.
    pub(super) scope: Option<String>,
    pub(super) make: Factory<B>,
}

/// A built computation.
pub(super) struct BuiltNode {
    op: Rc<dyn StageOp>,
    /// Its parameters, if it knows them better than its scope, which several nodes share.
    named: Option<NamedTensors>,
}

impl BuiltNode {
    pub(super) fn of(op: impl StageOp + 'static) -> Self {
        Self { op: Rc::new(op), named: None }
    }

    pub(super) fn boxed(op: Box<dyn StageOp>) -> Self {
        Self { op: Rc::from(op), named: None }
    }

    pub(super) fn with(op: impl StageOp + 'static, named: NamedTensors) -> Self {
        Self { op: Rc::new(op), named: Some(named) }
    }
}

/// Objects shared by several nodes while nodes are built, by the value that stands for each.
#[derive(Default)]
pub(super) struct BuildContext {
    /// Whether nodes are built only for their sizes.
    pub(super) is_measuring: bool,
    things: RefCell<BTreeMap<ValueId, Rc<dyn Any>>>,
}

impl BuildContext {
    pub(super) fn measuring() -> Self {
        Self { is_measuring: true, ..Self::default() }
    }

    pub(super) fn put<T: 'static>(&self, id: ValueId, thing: Rc<T>) {
        self.things.borrow_mut().insert(id, thing);
    }

    pub(super) fn get<T: 'static>(&self, id: ValueId) -> Option<Rc<T>> {
        self.things.borrow().get(&id).cloned()?.downcast().ok()
    }
}

/// Builds a node's computation, and returns the parameters that it requested.
pub(super) fn build<B: Scope>(
    node: &Node,
    recipe: &NodeBuilder<B>,
    scope: &B,
    workshop: &BuildContext,
) -> Result<(Rc<dyn StageOp>, NamedTensors)> {
    // Random layers know the place where they are built.
    let make = |scope: &B| Draws::at(&node.name, None, 0..0, || (recipe.make)(scope, workshop));
    let Some(path) = &recipe.scope else {
        return Ok((make(scope).map_err(|error| error.at_node(&node.name))?.op, NamedTensors::new()));
    };
    let built = scope.at(path).watch(make);
    let (made, asked) = built.map_err(|error| error.at_node(&node.name))?;
    let (op, mut named) = (made.op, made.named.unwrap_or(asked));
    if !matches!(node.kind, NodeKind::Parameter(_)) {
        return Ok((op, named));
    }
    if named.is_empty() {
        // A model with its own parameters requests none from the scope.
        let (device, dtype) = (Device::Cpu, scope.dtype());
        let ctx = Ctx { device, dtype, microbatch: 0, rows: 0..0, step: 0, training: false, masked: None };
        let made = op.forward(&[], &ctx)?;
        let behind = made.tensors().into_iter().flat_map(Tensor::sorted_nodes);
        let variables = behind.filter(|tensor| tensor.is_variable());
        named.extend(variables.map(|tensor| (node.name.clone(), tensor.clone())));
    }
    match named.iter().find(|(name, _)| !ends_with(name, &node.name)) {
        Some((name, _)) => Err(Error::Pipe(format!("parameter {:?} is built from {name:?}", node.name))),
        None => Ok((op, named)),
    }
}

/// Returns whether a full name is `name`, with or without a prefix of a builder.
fn ends_with(full: &str, name: &str) -> bool {
    full.strip_suffix(name).is_some_and(|prefix| prefix.is_empty() || prefix.ends_with('.'))
}
