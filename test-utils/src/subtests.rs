//! Tests with many settings.
use candle_dist::{DeviceMesh, RankContext};
use itertools::iproduct;
use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The settings of a test: a tuple of up to eight `(name, values)`. Each setting has its own type of values.
pub trait Settings {
    /// One value of each setting.
    type Values;

    /// Calls `f` with each combination of values and its description. The last setting changes fastest.
    fn each(self, f: impl FnMut(Self::Values, &str));
}

macro_rules! settings {
    ($($Values:ident $value:ident $at:tt),+) => {
        impl<'a, $($Values),+> Settings for ($((&'a str, $Values),)+)
        where
            $($Values: IntoIterator<Item: Clone + Debug, IntoIter: Clone>,)+
        {
            type Values = ($($Values::Item,)+);

            fn each(self, mut f: impl FnMut(Self::Values, &str)) {
                for ((), $($value),+) in iproduct!([()], $(self.$at.1),+) {
                    let shown = [$(format!("{}={:?}", self.$at.0, $value)),+].join(", ");
                    f(($($value,)+), &shown);
                }
            }
        }
    };
}

settings!(A a 0);
settings!(A a 0, B b 1);
settings!(A a 0, B b 1, C c 2);
settings!(A a 0, B b 1, C c 2, D d 3);
settings!(A a 0, B b 1, C c 2, D d 3, E e 4);
settings!(A a 0, B b 1, C c 2, D d 3, E e 4, F g 5);
settings!(A a 0, B b 1, C c 2, D d 3, E e 4, F g 5, H h 6);
settings!(A a 0, B b 1, C c 2, D d 3, E e 4, F g 5, H h 6, I i 7);

/// Runs `f` with each combination of the values of the named settings, in order. The last setting changes fastest.
///
/// # Panics
/// With the first panic of `f`, after printing the settings.
///
/// ```
/// use test_utils::run_subtests;
///
/// let mut seen = Vec::new();
/// run_subtests((("world", 1..=2), ("kind", ["even", "uneven"]), ("bias", [true])), |(world, kind, bias)| {
///     seen.push(format!("{world} {kind} {bias}"));
/// });
/// assert_eq!(seen, ["1 even true", "1 uneven true", "2 even true", "2 uneven true"]);
/// ```
pub fn run_subtests<S: Settings>(settings: S, mut f: impl FnMut(S::Values)) {
    settings.each(|values, shown| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(values))) {
            eprintln!("subtest failed with {shown}");
            resume_unwind(panic);
        }
    });
}

/// Runs `f` on a mesh with these axes, with one rank per place.
///
/// # Panics
/// Like [`on_ranks`](crate::on_ranks).
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_subtest_ends_the_run_with_its_own_panic() {
        let mut ran = 0;
        let run = AssertUnwindSafe(|| {
            run_subtests((("a", [1, 2, 3]),), |(a,)| {
                ran += 1;
                assert!(a < 2, "two is too much");
            });
        });
        let panic = catch_unwind(run).unwrap_err();
        assert_eq!((ran, panic.downcast_ref::<&str>()), (2, Some(&"two is too much")));
    }

    #[test]
    fn settings_of_any_types_are_combined_and_named() {
        let mut shown = Vec::new();
        let settings = (("size", vec![3usize, 0]), ("name", ["a"]), ("p", [Some(0.5), None]));
        settings.each(|(size, name, p): (usize, &str, Option<f64>), text| {
            assert_eq!(text, format!("size={size}, name={name:?}, p={p:?}"));
            shown.push((size, p.is_some()));
        });
        assert_eq!(shown, [(3, true), (3, false), (0, true), (0, false)]);
        run_subtests((("nothing", Vec::<u8>::new()), ("b", [1])), |_| panic!("there is no combination"));
    }
}
