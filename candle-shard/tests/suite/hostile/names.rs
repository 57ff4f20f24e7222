//! Names that come twice, or that the format needs for itself.
use super::{alike, contents, untouched};
use candle_core::{DType, Device, Tensor};
use candle_shard::sharded_tensor::save_state;
use candle_shard::{ChunkShardingSpec, DTensor, Replicate, Result, ShardedTensor, checkpoint};
use test_utils::{Attacks, Scratch};

fn refused(
    folder: &Scratch,
    f: impl Fn(&candle_dist::RankContext) -> Result<()> + Send + Sync,
    part: &str,
) -> Result<(), String> {
    let before = contents(&folder.path(""));
    match alike(f) {
        Ok(()) => Err("taken".into()),
        Err(text) if !text.contains(part) => Err(format!("{text:?} lacks {part:?}")),
        Err(_) if contents(&folder.path("")).len() != before.len() => Err("left files".into()),
        Err(_) => untouched(&before, &folder.path("")),
    }
}

#[test]
fn names_that_are_written_are_unlike_and_not_reserved() {
    let folder = Scratch::new("names");
    let mut a = Attacks::new("names of tensors");
    let path = folder.path("out");
    let of = |mesh: &candle_dist::DeviceMesh, rows: usize| {
        DTensor::distribute(&Tensor::zeros((rows, 2), DType::F32, &Device::Cpu)?, mesh, &[Replicate])
    };
    let lists: [(&[&str], &str); 5] = [
        (&["a", "b", "a"], "named twice"),
        (&["__metadata__"], "not a valid name"),
        (&["a", "__metadata__"], "not a valid name"),
        (&[""], "not a valid name"),
        (&["a", ""], "not a valid name"),
    ];
    for (names, part) in lists {
        let tensors = |mesh: &candle_dist::DeviceMesh| -> Result<Vec<(&str, DTensor)>> {
            names.iter().map(|name| Ok((*name, of(mesh, 3)?))).collect()
        };
        a.attack(format!("save {names:?}"), || {
            refused(
                &folder,
                |ctx| {
                    let mesh = ctx.mesh(&[("tp", 2)])?;
                    checkpoint::save(&path, &mesh, &tensors(&mesh)?)
                },
                part,
            )
        });
        a.attack(format!("save_stages {names:?}"), || {
            refused(
                &folder,
                |ctx| {
                    let mesh = ctx.mesh(&[("tp", 2)])?;
                    checkpoint::save_stages(&path, mesh.group()?, &tensors(&mesh)?)
                },
                part,
            )
        });
        a.attack(format!("export {names:?}"), || {
            refused(
                &folder,
                |ctx| {
                    let mesh = ctx.mesh(&[("tp", 2)])?;
                    checkpoint::export(&path, &mesh, &tensors(&mesh)?)
                },
                part,
            )
        });
        if part != "named twice" {
            a.attack(format!("save_state {names:?}"), || {
                refused(
                    &folder,
                    |ctx| {
                        let x = Tensor::zeros((4, 2), DType::F32, &Device::Cpu)?;
                        let tensor = |name: &&str| {
                            let spec = ChunkShardingSpec::on_ranks(0, [0, 1])?;
                            Ok(((*name).to_owned(), ShardedTensor::distribute(&x, spec, ctx.group())?))
                        };
                        save_state(&path, ctx.group(), &names.iter().map(tensor).collect::<Result<_>>()?)
                    },
                    part,
                )
            });
        }
    }
    let parts: [(&[&str], &str); 6] = [
        (&["p", "p", "q"], "named twice"),
        (&["p", "q", "p"], "named twice"),
        (&["p", "__metadata__", "q"], "not a valid name"),
        (&["p", "", "q"], "not a valid name"),
        (&["p", "other", "q"], "named twice"),
        (&["p", "q"], "give one for each of its rows"),
    ];
    for (names, part) in parts {
        a.attack(format!("export_parts {names:?}"), || {
            refused(
                &folder,
                |ctx| {
                    let mesh = ctx.mesh(&[("tp", 2)])?;
                    let of_parts = |name: &str| {
                        (name == "x").then(|| names.iter().map(|name| (*name).to_owned()).collect())
                    };
                    checkpoint::export_parts(
                        &path,
                        &mesh,
                        &[("x", of(&mesh, 3)?), ("other", of(&mesh, 3)?)],
                        of_parts,
                    )
                },
                part,
            )
        });
    }
    // The names of one rank alone.
    for (nth, list) in
        [vec!["p", "q"], vec!["p", "q", "s"], vec!["p", "p", "r"], vec![]].into_iter().enumerate()
    {
        for rank in 0..2 {
            a.attack(format!("export_parts {nth} on rank {rank}"), || {
                let (list, path) = (&list, &path);
                refused(
                    &folder,
                    move |ctx| {
                        let mesh = ctx.mesh(&[("tp", 2)])?;
                        let names = if ctx.rank() == rank { list.clone() } else { vec!["p", "q", "r"] };
                        let of_parts = |_: &str| Some(names.iter().map(|name| (*name).to_owned()).collect());
                        checkpoint::export_parts(path, &mesh, &[("x", of(&mesh, 3)?)], of_parts)
                    },
                    "",
                )
            });
        }
    }
    // Names that look odd and are none of the format's.
    for (nth, name) in ["a\nb", "a\"b", "{}", "ä", "../x", " ", "metadata"].into_iter().enumerate() {
        a.attack(format!("{name:?} is written"), || {
            let at = folder.path(format!("odd-{nth}"));
            alike(|ctx| {
                let mesh = ctx.mesh(&[("tp", 2)])?;
                checkpoint::save(&at, &mesh, &[(name, of(&mesh, 3)?)])?;
                checkpoint::export(at.with_extension("safetensors"), &mesh, &[(name, of(&mesh, 3)?)])
            })?;
            for at in [at.clone(), at.with_extension("safetensors")] {
                let weights = candle_shard::Weights::open(at).map_err(|error| error.to_string())?;
                weights.shape(name).map_err(|error| error.to_string())?;
            }
            Ok::<_, String>(())
        });
    }
    a.assert();
}
