//! Plans that are known already.
//!
//! Specs are shared (see [`Spec::shared`]), so inputs that lie alike have the same spec in memory, and a few addresses
//! and flags identify a call. A thread keeps its own plans: it is one rank, and no lock is taken.
use super::plan::Plan;
use crate::dtensor::{Axes, DTensor};
use crate::spec::Spec;
use crate::{Error, Result};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::sync::Arc;

/// Plans kept; a program whose shapes change all the time starts over from here.
const MOST: usize = 4096;

/// Whose op it is: the type of its signature for one of another crate, which may have the name of one of this crate.
pub(super) type Owner = Option<&'static str>;

/// What a plan depends on.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    op: &'static str,
    owner: Owner,
    attributes: SmallVec<[usize; 8]>,
    inputs: SmallVec<[(usize, Axes, bool); 3]>,
}

struct Known {
    plan: Arc<Plan>,
    /// Keeps the addresses in the key from being used again.
    _inputs: SmallVec<[Arc<Spec>; 3]>,
}

thread_local! {
    static PLANS: RefCell<FxHashMap<Key, Known>> = RefCell::default();
}

/// The plan of a call, made by `make` if it is new.
///
/// In debug builds `make` is asked for known calls too: an attribute that is left out of the key is found there.
pub(super) fn plan(
    (op, owner): (&'static str, Owner),
    attributes: &[usize],
    inputs: &[&DTensor],
    make: impl FnOnce() -> Result<Plan>,
) -> Result<Arc<Plan>> {
    let of_input = |x: &&DTensor| (Arc::as_ptr(x.shared_spec()) as usize, x.varying(), x.tracked());
    let key = Key { op, owner, attributes: attributes.into(), inputs: inputs.iter().map(of_input).collect() };
    if let Some(plan) = PLANS.with_borrow(|plans| plans.get(&key).map(|known| known.plan.clone())) {
        if cfg!(debug_assertions) {
            made_again(op, &plan, make())?;
        }
        return Ok(plan);
    }
    let plan = Arc::new(make()?);
    let inputs = inputs.iter().map(|x| x.shared_spec().clone()).collect();
    PLANS.with_borrow_mut(|plans| {
        if plans.len() >= MOST {
            plans.clear();
        }
        plans.insert(key, Known { plan: plan.clone(), _inputs: inputs });
    });
    Ok(plan)
}

/// An error if a known call gets another plan than before.
fn made_again(op: &'static str, known: &Plan, again: Result<Plan>) -> Result<()> {
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

fn shown(plan: &Plan) -> String {
    plan.outs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
