//! The lock file of the workspace.
use std::path::Path;

/// candle-dist-kernels turns on AVX-512 in the crate that multiplies candle's matrices by naming the same version of it. Two
/// versions would mean that the feature has no effect on candle.
#[test]
fn candle_and_the_feature_for_avx512_share_one_gemm() {
    let lock = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.lock")).unwrap();
    for name in ["gemm", "gemm-common", "gemm-f32", "pulp"] {
        let line = format!("name = \"{name}\"");
        assert_eq!(lock.lines().filter(|text| *text == line).count(), 1, "versions of {name} in Cargo.lock");
    }
}
