//! How tokens of the toy Transformer lie on a mesh.
use candle_dist::DeviceMesh;
use candle_shard::{Placement, Replicate, Shard};

/// Returns how tokens `[batch, sequence, ..]` of the toy Transformer lie on a mesh: cut by sequences on the axes `dp`,
/// `fsdp` and `ep`, along sequences on `cp`, and whole on all others.
pub fn placements(mesh: &DeviceMesh) -> Vec<Placement> {
    let of_axis = |name: &String| match name.as_str() {
        "dp" | "fsdp" | "ep" => Shard(0),
        "cp" => Shard(1),
        _ => Replicate,
    };
    mesh.names().iter().map(of_axis).collect()
}
