//! Bytes that changed on the disk: each is noticed, or it changes nothing.
use super::alike;
use candle_core::{DType, Device, Tensor};
use candle_dist::World;
use candle_dist::bits::digest_bytes;
use candle_shard::{DTensor, Replicate, Result, Shard, Weights, checkpoint};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use test_utils::{Attacks, Scratch};

/// Tensors of several dtypes, one of them longer than a block of digests.
fn tensors() -> Vec<(&'static str, Tensor)> {
    let of = |n: usize, dtype| Tensor::arange(0f32, n as f32, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    vec![
        ("a", of(12, DType::F32).reshape((6, 2)).unwrap()),
        ("b", of(600_000, DType::F32).reshape((600, 1000)).unwrap()),
        ("c", of(10, DType::I32)),
        ("d", of(8, DType::F16).reshape((2, 4)).unwrap()),
        ("e", of(8, DType::BF16).reshape((2, 4)).unwrap()),
    ]
}

fn written(folder: &Scratch) -> (PathBuf, PathBuf) {
    let (saved, exported) = (folder.path("saved"), folder.path("exported.safetensors"));
    alike(|ctx| {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let placed = |(name, tensor): (&'static str, Tensor)| {
            let placement = if name == "c" { Replicate } else { Shard(0) };
            Ok((name, DTensor::distribute(&tensor, &mesh, &[placement])?))
        };
        let tensors: Vec<_> = tensors().into_iter().map(placed).collect::<Result<_>>()?;
        checkpoint::save(&saved, &mesh, &tensors)?;
        checkpoint::export(&exported, &mesh, &tensors)
    })
    .unwrap();
    (saved, exported)
}

fn bytes_of(tensor: &Tensor) -> Vec<u64> {
    let list = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    list.into_iter().map(f64::to_bits).collect()
}

fn truth() -> BTreeMap<&'static str, Vec<u64>> {
    tensors().iter().map(|(name, tensor)| (*name, bytes_of(tensor))).collect()
}

/// An error, or the numbers that were saved.
fn held(path: &Path, truth: &BTreeMap<&'static str, Vec<u64>>) -> Result<Option<String>, String> {
    let weights = match Weights::open(path) {
        Ok(weights) => weights,
        Err(error) => return Ok(Some(error.to_string())),
    };
    let mut said = None;
    for (name, want) in truth {
        let read = || {
            let block: Vec<_> = weights.shape(name)?.iter().map(|&n| 0..n).collect();
            weights.read_block(name, &block, &Device::Cpu)
        };
        match read() {
            Ok(tensor)
                if bytes_of(&tensor) != *want
                    || tensor.dtype() != tensors().iter().find(|(n, _)| n == name).unwrap().1.dtype() =>
            {
                return Err(format!("{name:?} loads and is not what was saved"));
            }
            Ok(_) => {}
            Err(error) => said = Some(error.to_string()),
        }
    }
    Ok(said)
}

#[test]
fn no_byte_of_a_file_changes_unnoticed() {
    let folder = Scratch::new("damage");
    let (saved, exported) = written(&folder);
    let truth = truth();
    let mut a = Attacks::new("damaged files");
    for path in [&saved, &exported] {
        assert_eq!(held(path, &truth), Ok(None));
    }
    let mut files: Vec<_> =
        fs::read_dir(&saved).unwrap().map(|entry| (saved.clone(), entry.unwrap().path())).collect();
    files.push((exported.clone(), exported));
    for (opened, file) in files {
        let good = fs::read(&file).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let head = match name.ends_with("json") {
            true => good.len(),
            false => 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize,
        };
        let data = (head..good.len()).step_by(99_991).chain([head, good.len() - 1]);
        for (at, change) in
            (0..head).step_by(3).map(|at| (at, at as u8 | 1)).chain(data.map(|at| (at, 1 << (at % 8))))
        {
            if at >= good.len() {
                continue;
            }
            a.attack(format!("{name} at {at} of {}", good.len()), || {
                let mut bad = good.clone();
                bad[at] ^= change;
                fs::write(&file, bad).map_err(|error| error.to_string())?;
                let said = held(&opened, &truth)?;
                match said {
                    None if at >= head => Err("nobody noticed".to_owned()),
                    Some(said) if at >= head && !(said.contains(&name) && said.contains('"')) => {
                        Err(format!("names neither the file nor a tensor: {said}"))
                    }
                    _ => Ok(()),
                }
            });
        }
        for cut in
            [0, 1, 7, 8, 9, head / 2, head - 1, head, (head + good.len()) / 2, good.len().saturating_sub(1)]
        {
            a.attack(format!("{name} cut to {cut}"), || {
                fs::write(&file, &good[..cut.min(good.len() - 1)]).map_err(|error| error.to_string())?;
                held(&opened, &truth)?.map(drop).ok_or("nobody noticed".to_owned())
            });
        }
        a.attack(format!("{name} with a byte more"), || {
            fs::write(&file, [&good[..], b"x"].concat()).map_err(|error| error.to_string())?;
            held(&opened, &truth)?.map(drop).ok_or("nobody noticed".to_owned())
        });
        fs::write(&file, &good).unwrap();
    }
    a.assert();
}

/// Ranks that read pieces: a flipped bit in what they read is an error on all of them.
#[test]
fn pieces_are_checked_too() {
    let folder = Scratch::new("pieces");
    let (saved, _) = written(&folder);
    let mut a = Attacks::new("damaged pieces");
    let largest = fs::read_dir(&saved).unwrap().map(|entry| entry.unwrap().path());
    let largest = largest.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let good = fs::read(&largest).unwrap();
    for at in (8192..good.len()).step_by(150_001) {
        for dim in 0..2 {
            a.attack(format!("a bit at {at} in dim {dim}"), || {
                let mut bad = good.clone();
                bad[at] ^= 16;
                fs::write(&largest, bad).map_err(|error| error.to_string())?;
                let texts = World::threads(3).run(|ctx| -> Result<String> {
                    let mesh = ctx.mesh(&[("tp", 3)])?;
                    let loaded = checkpoint::load(&saved, &mesh, &[("b", [Shard(dim)])], &Device::Cpu);
                    Ok(loaded.err().map(|error| error.to_string()).unwrap_or_default())
                });
                let texts = texts.map_err(|error| error.to_string())?;
                match texts.iter().all(|text| *text == texts[0] && text.contains("\"b\"")) {
                    true => Ok(()),
                    false => Err(format!("{texts:?}")),
                }
            });
        }
    }
    a.assert();
}

/// Two pieces of one shape that change places are the same bytes in other files.
#[test]
fn files_that_changed_places_are_noticed() {
    let folder = Scratch::new("places");
    let (saved, _) = written(&folder);
    let truth = truth();
    let mut a = Attacks::new("files that changed places");
    let files: Vec<_> = fs::read_dir(&saved).unwrap().map(|entry| entry.unwrap().path()).collect();
    let data: Vec<_> =
        files.iter().filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    let held_by: Vec<_> = data.iter().map(|path| fs::read(path).unwrap()).collect();
    a.attack("swapped", || {
        fs::write(data[0], &held_by[1])
            .and_then(|()| fs::write(data[1], &held_by[0]))
            .map_err(|error| error.to_string())?;
        held(&saved, &truth)?.map(drop).ok_or("nobody noticed".to_owned())
    });
    a.attack("one of another save", || {
        fs::write(data[0], &held_by[0])
            .and_then(|()| fs::write(data[1], &held_by[1]))
            .map_err(|error| error.to_string())?;
        let other = Scratch::new("places");
        let (other, _) = written(&other);
        let from = fs::read_dir(other).unwrap().map(|entry| entry.unwrap().path());
        let from = from.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).max().unwrap();
        let to = data.iter().max().unwrap();
        fs::copy(from, to).map_err(|error| error.to_string())?;
        held(&saved, &truth).map(drop)
    });
    a.assert();
}

/// What versions without digests have written loads.
#[test]
fn checkpoints_without_digests_load() {
    let folder = Scratch::new("old");
    let path = folder.path("saved");
    fs::create_dir_all(&path).unwrap();
    let half = |value: f32| Tensor::full(value, (2, 2), &Device::Cpu).unwrap();
    for (rank, value) in [1f32, 2.].into_iter().enumerate() {
        let file = path.join(format!("rank-{rank:05}.3.safetensors"));
        candle_core::safetensors::save(&[("x", half(value))].into(), file).unwrap();
    }
    let index = r#"{"format": 1, "tensors": {"x": {"shape": [4, 2], "dtype": "F32", "pieces": [
        {"file": "rank-00000.3.safetensors", "start": [0, 0], "shape": [2, 2]},
        {"file": "rank-00001.3.safetensors", "start": [2, 0], "shape": [2, 2]}]}}}"#;
    fs::write(path.join("checkpoint.json"), index).unwrap();
    let read = |path: &Path| {
        let x = Weights::open(path)?.read_block("x", &[0..4, 0..2], &Device::Cpu)?;
        Ok::<_, candle_shard::Error>(x.flatten_all()?.to_vec1::<f32>()?)
    };
    assert_eq!(read(&path).unwrap(), [1., 1., 1., 1., 2., 2., 2., 2.]);
    // A new checkpoint takes its place, and its files go.
    super::save(&path, 5).unwrap();
    assert_eq!(super::loaded(&path), Ok(5));
    assert_eq!(fs::read_dir(&path).unwrap().count(), 3);
}

/// The size of a block is what a stranger says.
#[test]
fn blocks_of_digests_that_take_more_memory_than_a_file_needs_are_refused() {
    let folder = Scratch::new("blocks");
    let path = folder.path("x.safetensors");
    let open = |block: usize| {
        let data = [7u8; 8];
        let header = |digest: u64| {
            let digests = format!("{block} {digest:016x}{:016x}", digest_bytes(&data));
            let metadata = format!(r#"{{"format":"pt","candle-shard.xxh3":"{digests}"}}"#);
            format!(r#"{{ "__metadata__":{metadata},"x":{{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}}}"#)
        };
        let header = header(digest_bytes(header(0).as_bytes()));
        fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat())
            .unwrap();
        let x = Weights::open(&path)?.read_block("x", std::slice::from_ref(&(2..5)), &Device::Cpu)?;
        Ok::<_, candle_shard::Error>(x.to_vec1::<u8>()?)
    };
    assert_eq!(open(1 << 20).unwrap(), [7, 7, 7]);
    for block in [0, (64 << 20) + 1, 1 << 62] {
        let error = open(block).unwrap_err().to_string();
        assert!(error.contains("not as it was written"), "{block}: {error}");
    }
}
