//! Observers of the results of ops.
use crate::DTensor;
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

/// Receives the name, the source line and a result of each op.
type Observer = Rc<RefCell<dyn FnMut(&'static str, &'static Location<'static>, &DTensor)>>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Runs `f` and calls `observer` with the name, the source line and each result of every op in it, when the op ends.
///
/// Ops that other ops run come before these. The observer may run ops itself, such as
/// [`full_tensor`](DTensor::full_tensor); they are not observed. Use it to find the first op whose result differs between
/// two runs.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard, observe};
/// use std::cell::RefCell;
/// use std::rc::Rc;
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let x = DTensor::ones((3, 4), DType::F32, &Device::Cpu, &mesh, &[Shard(0)])?;
///     let ops = Rc::new(RefCell::new(Vec::new()));
///     let list = ops.clone();
///     observe(move |op, _, result| list.borrow_mut().push(format!("{op} {}", result.spec())), || x.relu()?.sum(0))?;
///     assert_eq!(*ops.borrow(), ["relu f32[3@tp, 4]", "sum f32[4] P(sum)@tp"]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn observe<R>(
    observer: impl FnMut(&'static str, &'static Location<'static>, &DTensor) + 'static,
    f: impl FnOnce() -> R,
) -> R {
    with(Some(Rc::new(RefCell::new(observer))), f)
}

/// Runs `f` with this observer, or with none.
fn with<R>(observer: Option<Observer>, f: impl FnOnce() -> R) -> R {
    /// Restores the outer observer, even if `f` panics.
    struct Outer(Option<Observer>);
    impl Drop for Outer {
        fn drop(&mut self) {
            OBSERVER.replace(self.0.take());
        }
    }
    let _outer = Outer(OBSERVER.replace(observer));
    f()
}

/// Passes the results of an op to the observer, if there is one.
pub(super) fn results(op: &'static str, site: &'static Location<'static>, results: &[DTensor]) {
    let Some(observer) = OBSERVER.with_borrow(Clone::clone) else { return };
    with(None, || results.iter().for_each(|result| (observer.borrow_mut())(op, site, result)));
}
