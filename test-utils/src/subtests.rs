//! One test with many settings, or with none because the machine lacks something.
use candle_core::Device;
use candle_dist::{DeviceMesh, RankContext};
use itertools::Itertools;
use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Runs `f` with every combination of the values that each named setting can take, in order, the last one fastest.
///
/// # Panics
/// With the first panic of `f`, after the settings were printed.
///
/// ```
/// use test_utils::run_subtests;
///
/// let mut seen = Vec::new();
/// run_subtests(&[("world", &[1, 2][..]), ("dim", &[0, 1][..])], |values| seen.push([*values[0], *values[1]]));
/// assert_eq!(seen, [[1, 0], [1, 1], [2, 0], [2, 1]]);
/// ```
pub fn run_subtests<V: Debug>(settings: &[(&str, &[V])], mut f: impl FnMut(&[&V])) {
    for values in settings.iter().map(|(_, values)| values.iter()).multi_cartesian_product() {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(&values))) {
            let shown = settings.iter().zip(&values).map(|((name, _), value)| format!("{name}={value:?}")).join(", ");
            eprintln!("subtest failed with {shown}");
            resume_unwind(panic);
        }
    }
}

/// Runs `f` on as many ranks as a mesh with these axes has, with the mesh.
///
/// # Panics
/// As [`on_ranks`](crate::on_ranks).
///
/// ```
/// use test_utils::on_mesh;
///
/// let places = on_mesh(&[("dp", 2), ("tp", 1)], "places", |_, mesh| {
///     Ok::<_, candle_dist::Error>(mesh.coordinate().to_vec())
/// });
/// assert_eq!(places, [[0, 0], [1, 0]]);
/// ```
pub fn on_mesh<T, E, F>(axes: &'static [(&'static str, usize)], label: &str, f: F) -> Vec<T>
where
    T: Send + 'static,
    E: Display,
    F: Fn(&RankContext, &DeviceMesh) -> Result<T, E> + Send + Sync + 'static,
{
    crate::on_ranks(axes.iter().map(|(_, size)| size).product(), label, move |ctx| -> Result<T, String> {
        let mesh = ctx.mesh(axes).map_err(|error| error.to_string())?;
        f(ctx, &mesh).map_err(|error| error.to_string())
    })
}

/// Whether a test must be skipped because there are fewer than `n` GPUs; says so on stderr.
///
/// ```
/// # fn a_test() {
/// if test_utils::skip_unless_gpus(2) {
///     return;
/// }
/// // what needs two GPUs
/// # }
/// # a_test();
/// ```
pub fn skip_unless_gpus(n: usize) -> bool {
    let Some((at, error)) = (0..n).find_map(|at| Device::new_cuda(at).err().map(|error| (at, error))) else {
        return false;
    };
    let reason = error.to_string();
    eprintln!("SKIPPED: needs {n} GPUs and found {at} ({})", reason.lines().next().unwrap_or_default());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_subtest_ends_the_run_with_its_own_panic() {
        let mut ran = 0;
        let run = AssertUnwindSafe(|| {
            run_subtests(&[("a", &[1, 2, 3])], |values| {
                ran += 1;
                assert!(*values[0] < 2, "two is too much");
            });
        });
        let panic = catch_unwind(run).unwrap_err();
        assert_eq!((ran, panic.downcast_ref::<&str>()), (2, Some(&"two is too much")));
    }

    #[test]
    fn no_gpus_are_always_there_and_a_million_never() {
        assert!(!skip_unless_gpus(0));
        assert!(skip_unless_gpus(1_000_000));
    }
}
