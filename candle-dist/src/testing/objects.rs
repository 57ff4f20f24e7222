//! Values of any serde type.
use super::Case;
use crate::{MAX_OBJECT_BYTES, RankContext, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub(super) const CASES: &[Case] = &[
    Case { name: "objects of every size go where they are wanted", least: 1, run: everywhere },
    Case { name: "objects that cannot be sent are one error on all ranks", least: 1, run: refused },
    Case { name: "objects of the wrong number or from nobody are refused", least: 1, run: missing },
];

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SampleObject {
    name: String,
    parts: Vec<Option<(u32, f64)>>,
    more: BTreeMap<String, Vec<SampleObject>>,
}

/// Returns a value that depends on the rank, with its own size.
fn thing(rank: usize, len: usize) -> SampleObject {
    let parts = (0..len).map(|i| (i % 3 != rank % 3).then_some((i as u32, i as f64 / 3.0))).collect();
    let inner = SampleObject { name: "ß".repeat(rank), parts: Vec::new(), more: BTreeMap::new() };
    SampleObject {
        name: format!("thing {rank}"),
        parts,
        more: BTreeMap::from([("inner".to_string(), vec![inner; rank])]),
    }
}

fn everywhere(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for len in [0, 1, 100, 20_000] {
        let want: Vec<SampleObject> = (0..n).map(|rank| thing(rank, len * (rank % 2 + 1))).collect();
        assert_eq!(g.objects().all_gather(&want[r])?, want);
        for root in [0, n - 1] {
            let mine = (r == root).then_some(&want[r]);
            assert_eq!(g.objects().broadcast(mine, root)?, want[root]);
            assert_eq!(g.objects().gather(&want[r], root)?, (r == root).then(|| want.clone()));
            assert_eq!(g.objects().scatter((r == root).then_some(&want[..]), root)?, want[r]);
        }
    }
    assert_eq!(g.objects().all_gather(&())?, vec![(); n]);
    g.objects().broadcast(Some(&()), 0)
}

/// A value that is too large, or that cannot be serialized.
#[derive(Clone, Copy)]
struct BadObject {
    large: bool,
    unfit: bool,
}

impl Serialize for BadObject {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        if self.large {
            return serializer.serialize_bytes(&vec![0; MAX_OBJECT_BYTES]); // and a length
        }
        if self.unfit {
            return Err(serde::ser::Error::custom("unfit"));
        }
        serializer.serialize_u8(7)
    }
}

impl<'de> Deserialize<'de> for BadObject {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        match u8::deserialize(deserializer)? {
            7 => Ok(Self { large: false, unfit: false }),
            _ => Err(serde::de::Error::custom("no seven")),
        }
    }
}

fn refused(ctx: &RankContext) -> Result<()> {
    let (g, r, n) = (ctx.group(), ctx.rank(), ctx.world_size());
    for culprit in [0, n - 1] {
        for (large, text) in [(true, "takes more than 268435456 bytes"), (false, "cannot be sent")] {
            let mine = BadObject { large: large && r == culprit, unfit: !large && r == culprit };
            let good = BadObject { large: false, unfit: false };
            let list: Vec<BadObject> = (0..n).map(|to| if to == culprit { mine } else { good }).collect();
            let errors = [
                g.objects().all_gather(&mine).map(drop).unwrap_err(),
                g.objects().gather(&mine, 0).map(drop).unwrap_err(),
                g.objects().broadcast(Some(&mine), culprit).map(drop).unwrap_err(),
                g.objects().scatter(Some(&list), culprit).map(drop).unwrap_err(),
            ];
            for error in errors {
                let error = error.to_string();
                assert!(error.contains(text) && error.contains(&format!("rank {culprit}")), "{error}");
                // The error is the same on all ranks.
                assert_eq!(g.all_gather_text(&error)?, vec![error; n]);
            }
            assert_eq!(g.objects().all_gather(&r)?, (0..n).collect::<Vec<_>>());
        }
    }
    Ok(())
}

fn missing(ctx: &RankContext) -> Result<()> {
    let (g, n) = (ctx.group(), ctx.world_size());
    let root = n - 1;
    let errors = [
        g.objects().broadcast::<u32>(None, root).unwrap_err().to_string(),
        g.objects().scatter::<u32>(None, root).unwrap_err().to_string(),
        g.objects().scatter(Some(&vec![1u32; n + 1]), root).unwrap_err().to_string(),
    ];
    let texts = ["must give an object", "got 0", &format!("got {}", n + 1)];
    for (error, text) in errors.iter().zip(texts) {
        assert!(error.contains(text) && error.contains(&format!("rank {root}")), "{error}");
    }
    let text = g.objects().gather(&1u32, n).unwrap_err().to_string();
    assert!(text.contains("gather_object") && text.contains("is outside"), "{text}");
    g.barrier()
}
