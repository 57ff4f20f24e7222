//! Building the nodes of a stage, and of no other.
use super::builder::Factory;
use super::op::StageOp;
use super::scope::{Named, Scope};
use super::{Node, NodeKind};
use crate::{Error, Result};
use std::rc::Rc;

/// A node's computation, and the parameters that it asked for.
pub(super) fn build<B: Scope>(node: &Node, factory: &Factory<B>, scope: &B) -> Result<(Rc<dyn StageOp>, Named)> {
    let (module, is_parameter) = match node.kind {
        NodeKind::Function => return Ok((factory(scope)?, Named::new())),
        NodeKind::Module => (node.name.as_str(), false),
        NodeKind::Parameter(_) => (node.name.rsplit_once('.').map_or("", |(module, _)| module), true),
    };
    let (op, named) = scope.at(module).watch(|scope| factory(scope)).map_err(|error| error.at_node(&node.name))?;
    match named.iter().find(|(name, _)| is_parameter && !name.ends_with(&node.name)) {
        Some((name, _)) => Err(Error::Pipe(format!("parameter {:?} is built from {name:?}", node.name))),
        None => Ok((op, named)),
    }
}
