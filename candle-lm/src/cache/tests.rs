//! Copies of what caches keep.

use super::{Cache, LayerCache, TOKENS, begin};
use crate::step::{SlotPast, SlotTokens};
use candle_core::{Device, Tensor};
use candle_dist::World;
use candle_shard::nn::RowAdapters;
use candle_shard::{DTensor, Replicate, Result};

#[test]
fn copies_are_those_of_what_was_there_before_the_step() {
    let of = |slot, tokens| SlotPast::Prefix { slot, tokens };
    // What each of four slots begins with: a chain, two copies and a cut of one slot, a ring, one that is forgotten.
    let cases = [
        ([of(1, 2), of(2, 3), SlotPast::Nothing, SlotPast::All], ["11", "222", "", "3333"]),
        ([SlotPast::Nothing, of(0, 4), of(0, 1), of(3, 2)], ["", "0000", "0", "33"]),
        ([of(1, 1), of(2, 2), of(0, 3), of(0, 4)], ["1", "22", "000", "0000"]),
        ([of(0, 1), of(0, 3), of(3, 2), of(2, 1)], ["0", "000", "33", "2"]),
    ];
    World::threads(1)
        .run(|ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", 1)])?;
            for (past, want) in cases {
                let filled = |slot: usize| -> Result<Cache> {
                    let mut cache = Cache::new(1, 8);
                    let keys = Tensor::full(slot as f32, (1, 1, 4, 1), &Device::Cpu)?;
                    let keys = DTensor::distribute(&keys, &mesh, &[Replicate])?;
                    if let LayerCache::All(layer) = &mut cache.layers[0] {
                        layer.append(&keys, &keys)?;
                    }
                    cache.len = 4;
                    Ok(cache)
                };
                let mut slots = (0..4).map(filled).collect::<Result<Vec<_>>>()?;
                let span =
                    |(slot, past)| SlotTokens { slot, tokens: 1, past, rows: 1, adapters: RowAdapters::All };
                let spans: Vec<SlotTokens> = past.into_iter().enumerate().map(span).collect();
                begin(&mut slots, &spans)?;
                for (cache, want) in slots.iter().zip(want) {
                    let LayerCache::All(layer) = &cache.layers[0] else { panic!("a cache of all tokens") };
                    let text = match layer.k()? {
                        Some(keys) => {
                            assert_eq!(keys.dims()[TOKENS], cache.len);
                            let keys = keys.to_local().flatten_all()?.to_vec1::<f32>()?;
                            keys.iter().map(f32::to_string).collect()
                        }
                        None => String::new(),
                    };
                    assert_eq!((text.as_str(), cache.len), (want, want.len()), "{past:?}");
                }
            }
            Ok(())
        })
        .unwrap();
}
