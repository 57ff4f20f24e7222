//! The line of a program that a call is for.
use std::cell::Cell;
use std::panic::Location;

thread_local! {
    static SITE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Runs `f`, whose calls and graph nodes have the location `site`: for libraries, whose own lines say nothing to a reader of an error. Of
/// nested locations the outermost holds.
///
/// ```
/// use candle_dist::backend::called_from;
/// use candle_dist::{World, comm::Log};
/// use std::panic::Location;
///
/// World::threads(2).run(|ctx| {
///     let here = Location::caller();
///     let (met, events) = Log::of(|| called_from(here, || ctx.group().barrier()));
///     assert_eq!(events[0].site, here);
///     met
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn called_from<R>(site: &'static Location<'static>, f: impl FnOnce() -> R) -> R {
    /// Ends the scope, also when `f` panics.
    struct Outermost;
    impl Drop for Outermost {
        fn drop(&mut self) {
            SITE.set(None);
        }
    }
    if SITE.get().is_some() {
        return f();
    }
    SITE.set(Some(site));
    let _outermost = Outermost;
    f()
}

/// Returns the location of a call that is made at `here`: that of [`called_from`], within one.
pub fn line_of(here: &'static Location<'static>) -> &'static Location<'static> {
    SITE.get().unwrap_or(here)
}
