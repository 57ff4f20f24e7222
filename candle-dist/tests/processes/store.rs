//! The store, with the same results for processes and threads.
use crate::job::{assert_fine, finish, start, torchrun};
use candle_dist::{Error, RankContext, Result, World};
use std::time::{Duration, Instant};

/// The name of the scenario in which ranks use the store.
pub(crate) const USES_STORE: &str = "uses the store";

/// The name of the scenario in which ranks set more than the store keeps.
pub(crate) const FILLS_STORE: &str = "fills the store";

/// Ranks 1 and 2 set values under keys of their own until there is no room. Every rank runs this, in a world of three.
pub(crate) fn fill(ctx: &RankContext) -> Result<()> {
    let (store, rank) = (ctx.store(), ctx.rank());
    let key = |nth: usize| format!("{nth} of {rank}");
    let value = vec![rank as u8; 16 << 20];
    if rank > 0 {
        store.set(&key(0), &value)?;
    }
    ctx.group().barrier()?;
    if rank > 0 {
        let refused = (1..200).find_map(|nth| Some((nth, store.set(&key(nth), &value).err()?)));
        let (count, error) = refused.expect("3.2 GB are not kept");
        assert!(matches!(error, Error::InvalidArgument { op: "store", .. }), "{error}");
        let text = error.to_string();
        let parts = ["keeps at most 1048576 KiB", "of rank 1", "of rank 2", "Store::delete"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        // What is there stays, and what is deleted makes room.
        assert!(store.compare_and_set(&key(count), None, &value).is_err());
        assert_eq!(store.get_within(&key(count), Duration::ZERO)?, None);
        assert_eq!(store.get(&key(0))?, value);
        ctx.group().barrier()?;
        assert!(store.delete(&key(0))?);
        ctx.group().barrier()?;
        (1..count).try_for_each(|nth| store.delete(&key(nth)).map(|was| assert!(was)))?;
        store.set(&key(0), &value)?;
    } else {
        ctx.group().barrier()?;
        ctx.group().barrier()?;
    }
    // The backend of these tests keeps its sums in the store, which has room again.
    ctx.group().barrier()
}

/// Every rank runs this, in a world of three.
pub(crate) fn exercise(ctx: &RankContext) -> Result<()> {
    let (store, rank, size) = (ctx.store(), ctx.rank(), ctx.world_size());
    // Counters: every number is returned once.
    let drawn = (0..100).map(|_| store.add("drawn", 1)).collect::<Result<Vec<i64>>>()?;
    assert!(drawn.is_sorted() && drawn.iter().all(|&n| (1..=100 * size as i64).contains(&n)));
    store.add("done", 1)?;
    while store.add("done", 0)? < size as i64 {}
    assert_eq!(store.add("drawn", 0)?, 100 * size as i64);
    assert_eq!(store.get("drawn")?, (100 * size as i64).to_le_bytes());

    // A lock: only one rank holds it at a time, so an unguarded read and write loses no update.
    for _ in 0..20 {
        while store.compare_and_set("lock", None, &[rank as u8])?.is_some() {}
        let now = store.get_within("guarded", Duration::ZERO)?.map_or(0, |value| value[0]);
        store.set("guarded", &[now + 1])?;
        assert!(store.delete("lock")?, "it is this rank's");
    }
    store.add("unlocked", 1)?;
    while store.add("unlocked", 0)? < size as i64 {}
    assert_eq!(store.get("guarded")?, [20 * size as u8]);
    assert!(!store.delete("lock")?);

    // Swaps.
    let mine = format!("of {rank}");
    assert_eq!(store.compare_and_set(&mine, Some(b"a"), b"b")?, None);
    assert_eq!(store.compare_and_set(&mine, None, b"a")?, None);
    assert_eq!(store.compare_and_set(&mine, Some(b"x"), b"b")?, Some(b"a".to_vec()));
    assert_eq!(store.compare_and_set(&mine, Some(b"a"), b"b")?, Some(b"a".to_vec()));
    assert_eq!(store.get(&mine)?, b"b");

    // Waits with a limit: for a value that is never set, one that is set, and one that is set later.
    let began = Instant::now();
    assert_eq!(store.get_within(&format!("never of {rank}"), Duration::from_millis(200))?, None);
    assert!(began.elapsed() >= Duration::from_millis(200));
    if rank == 0 {
        std::thread::sleep(Duration::from_millis(100));
        store.set("late", b"come")?;
    }
    assert_eq!(store.get_within("late", Duration::from_secs(30))?.as_deref(), Some(&b"come"[..]));

    // Wrong arguments fail on the caller only.
    let refused = [
        store.add(&mine, 1).map(drop),
        store.set(&"k".repeat(4096), &[]),
        store.set("k", &vec![0; (16 << 20) + 1]),
        store.compare_and_set("k", Some(&vec![0; 9 << 20]), &vec![0; 9 << 20]).map(drop),
    ];
    for (error, text) in refused.into_iter().zip([
        "1 bytes, not a counter",
        "at most 4096",
        "at most 16777216",
        "at most 16777216",
    ]) {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { rank: r, op: "store", .. } if r == rank), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    store.add("over", 1)?;
    while store.add("over", 0)? < size as i64 {}
    Ok(())
}

#[test]
fn the_store_does_the_same_among_processes_and_threads() {
    let outcomes = finish(start(&format!("{USES_STORE}/none"), 3, torchrun(3)));
    assert_fine(&outcomes);
    World::threads(3).run(exercise).unwrap();
}

#[test]
fn values_that_find_no_room_are_refused_among_processes_and_threads() {
    let outcomes = finish(start(&format!("{FILLS_STORE}/none"), 3, torchrun(3)));
    assert_fine(&outcomes);
    World::threads(3).run(fill).unwrap();
}

#[test]
fn a_wait_for_a_value_ends_when_the_world_fails_or_its_time_is_over() {
    let failed = World::threads(2).run(|ctx| match ctx.rank() {
        0 => ctx.store().get_within("never", Duration::from_secs(100)).map(drop),
        _ => Err(Error::Unsupported("cheese".to_string())),
    });
    let error = failed.unwrap_err();
    assert!(error.rank == 1 && error.message.contains("cheese"), "{error}");
    let late = World::threads(2).timeout(Duration::from_millis(300)).run(|ctx| match ctx.rank() {
        0 => ctx.store().get("never").map(drop),
        _ => ctx.store().get_within("never", Duration::from_secs(100)).map(drop),
    });
    assert!(late.unwrap_err().message.contains("rank 0 waited longer than the timeout of 300ms"));
}
