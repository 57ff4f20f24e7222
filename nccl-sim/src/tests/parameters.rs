//! The simulator's table of kernels against the parameter lists that NVIDIA's compiler gives them
//! (`scripts/kernel_parameters.py`).
use crate::kernels::{Kernel, Size};
use std::collections::{BTreeMap, BTreeSet};

/// A kernel in each line, with the bytes of its parameters.
fn listed() -> BTreeMap<&'static str, Vec<Size>> {
    let size = |bytes: &str| match bytes {
        "1" => Size::One,
        "2" => Size::Two,
        "4" => Size::Four,
        "8" => Size::Eight,
        other => panic!("a parameter of {other} bytes"),
    };
    let line = |line: &'static str| {
        let (name, sizes) = line.split_once(' ').unwrap();
        (name, sizes.split(' ').map(size).collect())
    };
    include_str!("parameters.txt").lines().map(line).collect()
}

#[test]
fn kernels_take_the_parameters_that_the_compiler_gives_them() {
    let modeled: Vec<_> =
        listed().into_iter().filter_map(|(name, sizes)| Some((Kernel::named(name)?, sizes))).collect();
    for (kernel, sizes) in &modeled {
        assert_eq!(kernel.parameters(), sizes, "{}", kernel.name());
    }
    assert!(modeled.len() > 300, "{} kernels", modeled.len());
}

#[test]
fn the_table_has_no_kernel_that_candle_lacks() {
    const TYPES: [&str; 9] = ["u8", "u32", "i16", "i32", "i64", "bf16", "f16", "f32", "f64"];
    let listed = listed();
    let stem = |name: &&'static str| name.rsplit_once('_').map(|(stem, _)| stem);
    let stems: BTreeSet<_> = listed.keys().filter_map(stem).collect();
    for name in stems.iter().flat_map(|stem| TYPES.map(|ty| format!("{stem}_{ty}"))) {
        assert!(Kernel::named(&name).is_none() || listed.contains_key(&*name), "candle has no {name}");
    }
}
