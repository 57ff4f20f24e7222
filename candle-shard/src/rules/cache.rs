//! A cache of op specs.
//!
//! Specs are shared (see [`Spec::shared`]), so inputs with equal layouts have the same spec in memory. A few addresses
//! and flags identify a call. Each thread has its own cache: it is one rank, and no lock is needed.
use super::op_spec::OpSpec;
use crate::DTensor;
use crate::layout::{Axes, Spec};
use crate::{Error, Result};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::sync::Arc;

/// The most op specs that are kept. When the cache is full, it is cleared.
const MOST: usize = 4096;

/// The owner of an op: the signature's type for ops that are given from outside, which may share a name with an op of this crate.
pub(super) type Owner = Option<&'static str>;

/// Everything that an op spec depends on.
#[derive(PartialEq, Eq, Hash)]
struct OpSpecKey {
    op: &'static str,
    owner: Owner,
    attributes: SmallVec<[usize; 8]>,
    inputs: SmallVec<[(usize, Axes, bool); 3]>,
}

struct CacheEntry {
    op_spec: Arc<OpSpec>,
    /// Keeps the addresses in the key from being reused.
    _inputs: SmallVec<[Arc<Spec>; 3]>,
}

thread_local! {
    static OP_SPECS: RefCell<FxHashMap<OpSpecKey, CacheEntry>> = RefCell::default();
}

/// Returns the op spec of a call; `make` makes it if it is new.
///
/// In debug builds `make` also runs for known calls, which finds attributes that are missing in the key.
pub(super) fn op_spec(
    (op, owner): (&'static str, Owner),
    attributes: &[usize],
    inputs: &[&DTensor],
    make: impl FnOnce() -> Result<OpSpec>,
) -> Result<Arc<OpSpec>> {
    let of_input = |x: &&DTensor| (Arc::as_ptr(x.shared_spec()) as usize, x.varying(), x.tracked());
    let key =
        OpSpecKey { op, owner, attributes: attributes.into(), inputs: inputs.iter().map(of_input).collect() };
    if let Some(op_spec) =
        OP_SPECS.with_borrow(|op_specs| op_specs.get(&key).map(|known| known.op_spec.clone()))
    {
        if cfg!(debug_assertions) {
            made_again(op, &op_spec, make())?;
        }
        return Ok(op_spec);
    }
    let op_spec = Arc::new(make()?);
    let inputs = inputs.iter().map(|x| x.shared_spec().clone()).collect();
    OP_SPECS.with_borrow_mut(|op_specs| {
        if op_specs.len() >= MOST {
            op_specs.clear();
        }
        op_specs.insert(key, CacheEntry { op_spec: op_spec.clone(), _inputs: inputs });
    });
    Ok(op_spec)
}

/// Returns an error if a known call now has another op spec.
fn made_again(op: &'static str, known: &OpSpec, again: Result<OpSpec>) -> Result<()> {
    let differs = match again {
        Ok(again) if known.is(&again) => return Ok(()),
        Ok(again) => format!("gives {} where it gave {}", shown(&again), shown(known)),
        Err(error) => format!("refuses what it took before ({error})"),
    };
    Error::op(
        op,
        format!(
            "the same attributes and layouts, but its signature now {differs}: pass every value that the signature \
             depends on in the attributes"
        ),
    )
}

fn shown(op_spec: &OpSpec) -> String {
    op_spec.outs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
