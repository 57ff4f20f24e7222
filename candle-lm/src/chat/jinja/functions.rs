//! The functions of templates.

use std::cell::RefCell;
use std::rc::Rc;

use super::args::Args;
use super::eval::Renderer;
use super::filters;
use super::format;
use super::value::{JinjaValue, Loop};
use super::work::{EvalResult, SLOT, WorkBudget, fail};

const NAMES: [&str; 5] = ["range", "namespace", "dict", "raise_exception", "strftime_now"];

/// Returns the name of a function that there is.
pub(super) fn named(name: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|known| *known == name)
}

/// Calls a function.
pub(super) fn call(renderer: &mut Renderer<'_>, name: &'static str, args: Args) -> EvalResult<JinjaValue> {
    let work = renderer.work;
    match name {
        "range" => range(args, work),
        "namespace" => {
            let mut named = Vec::new();
            for (name, value) in entries(args, work)? {
                work.storable(&value)?;
                named.push((name.string()?.to_string(), value));
            }
            Ok(JinjaValue::Namespace(Rc::new(RefCell::new(named))))
        }
        "dict" => {
            let entries = entries(args, work)?;
            filters::dict(entries, work)
        }
        "raise_exception" => fail(args.one(name)?.shown(work)?.to_string()),
        "strftime_now" => format::time(args.one(name)?.string()?, renderer.now, work),
        _ => fail(format!("there is no function {name}")),
    }
}

/// The entries of dicts and of named arguments.
fn entries(args: Args, work: &WorkBudget) -> EvalResult<Vec<(JinjaValue, JinjaValue)>> {
    let mut made = Vec::new();
    for dict in args.positional {
        let JinjaValue::Map(map) = dict else { return fail(format!("a {} is no dict", dict.kind())) };
        work.charge(map.entries.len() as u64 * 64)?;
        made.extend(map.entries.iter().cloned());
    }
    for (name, value) in args.named {
        made.push((work.own(name)?, value));
    }
    Ok(made)
}

fn range(args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let bounds = args.bind("range", ["start", "stop", "step"])?;
    let bounds = bounds.into_iter().flatten().map(|bound| bound.int()).collect::<EvalResult<Vec<_>>>()?;
    let (mut at, stop, step) = match bounds[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] if step != 0 => (start, stop, step),
        _ => return fail("range takes one to three numbers, and no step 0"),
    };
    let mut made = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        work.charge(SLOT)?;
        made.push(JinjaValue::Int(at));
        at = at.saturating_add(step);
    }
    work.list(made)
}

/// Calls a method of `loop`.
pub(super) fn of_loop(of: &Loop, name: &str, args: Args, work: &WorkBudget) -> EvalResult<JinjaValue> {
    match name {
        "cycle" if !args.positional.is_empty() => {
            Ok(args.positional[of.index.get() % args.positional.len()].clone())
        }
        "changed" => {
            let mut seen = of.seen.borrow_mut();
            for value in &args.positional {
                work.storable(value)?;
            }
            let is_same = match &*seen {
                Some(old) if old.len() == args.positional.len() => {
                    let mut is_same = true;
                    for (old, new) in old.iter().zip(&args.positional) {
                        is_same &= old.equals(new, work)?;
                    }
                    is_same
                }
                _ => false,
            };
            *seen = Some(args.positional);
            Ok(JinjaValue::Bool(!is_same))
        }
        _ => fail(format!("a loop has no method {name}")),
    }
}
