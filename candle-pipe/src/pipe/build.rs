//! Building the nodes of a stage, and of no other.
use super::builder::Factory;
use crate::graph::{Ctx, Named, Node, NodeKind, Scope, StageOp};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use candle_dist::TensorTree;
use std::rc::Rc;

/// A node's computation, and the parameters that it asked for.
pub(super) fn build<B: Scope>(node: &Node, factory: &Factory<B>, scope: &B) -> Result<(Rc<dyn StageOp>, Named)> {
    let (module, is_parameter) = match node.kind {
        NodeKind::Function => return Ok((factory(scope)?, Named::new())),
        NodeKind::Module => (node.name.as_str(), false),
        NodeKind::Parameter(_) => (node.name.rsplit_once('.').map_or("", |(module, _)| module), true),
    };
    let (op, mut named) = scope.at(module).watch(|scope| factory(scope)).map_err(|error| error.at_node(&node.name))?;
    if !is_parameter {
        return Ok((op, named));
    }
    if named.is_empty() {
        // A model that brings its parameters along asks no scope for them.
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

/// Whether a full name is `name`, behind the prefix of a builder at most.
fn ends_with(full: &str, name: &str) -> bool {
    full.strip_suffix(name).is_some_and(|prefix| prefix.is_empty() || prefix.ends_with('.'))
}
