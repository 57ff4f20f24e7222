//! Step 1, gather inputs: which rows each rank wants, known to all ranks, or one error on all of them.
use crate::{Error, Result, kernels};
use candle_core::{DType, Device, Tensor};
use candle_dist::ProcessGroup;
use itertools::Itertools;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Ids without repetition, in rising order.
pub(crate) type Wanted = Vec<u32>;

/// What is wrong with a rank's arguments, in words.
pub(crate) type Wrong = String;

/// This rank's ids: each one once, and which of those stands at each place.
pub(crate) struct Ids {
    pub(crate) wanted: Wanted,
    /// For each id its place in `wanted`.
    pub(crate) places: Vec<u32>,
}

impl Ids {
    /// The elements of `ids` in row-major order, which must be rows of a table of so many.
    pub(crate) fn read(ids: &Tensor, rows: usize) -> Result<Self, Wrong> {
        if !matches!(ids.dtype(), DType::U8 | DType::U32 | DType::I64) {
            return Err(format!("ids are {}; give u8, u32 or i64", ids.dtype().as_str()));
        }
        let words = |error: candle_core::Error| error.to_string();
        let ids = ids.flatten_all().and_then(|ids| ids.to_dtype(DType::I64)?.to_vec1::<i64>()).map_err(words)?;
        if let Some(bad) = ids.iter().find(|&&id| id < 0 || id as u64 >= rows as u64) {
            return Err(format!("id {bad} is no row of a table of {rows} rows"));
        }
        let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
        let (wanted, places) = kernels::unique_rows_and_places(&ids);
        Ok(Self { wanted, places })
    }
}

/// Every rank's ids, in rank order.
///
/// `call` describes what must be alike on all ranks. Two small collectives.
///
/// # Errors
/// On all ranks alike, if a rank's arguments were wrong or the calls differ; nothing has happened then.
pub(crate) fn gather_inputs<T>(
    op: &'static str,
    group: &ProcessGroup,
    call: &str,
    mine: Result<T, Wrong>,
    wanted: impl Fn(&T) -> &Wanted,
) -> Result<(T, Vec<Wanted>)> {
    let mut hash = DefaultHasher::new();
    (op, call).hash(&mut hash);
    let count = mine.as_ref().map_or(-1, |mine| wanted(mine).len() as i64);
    let header = Tensor::new(&[count, hash.finish() as i64], &Device::Cpu)?;
    let headers = group.all_gather(&header, 0)?.to_vec1::<i64>()?;
    let headers = || headers.iter().tuples::<(_, _)>();
    let wrong = headers().any(|(&count, _)| count < 0);
    if wrong || !headers().map(|(_, hash)| hash).all_equal() {
        let words = if wrong { mine.err().unwrap_or_default() } else { format!("{op} {call}") };
        let words = group.all_gather_text(&words)?;
        return Err(Error::Op { op, reason: reason(group.ranks(), &words, wrong) });
    }
    let mine = mine.or_else(|reason| Error::op(op, reason))?;
    let counts: Vec<usize> = headers().map(|(&count, _)| count as usize).collect();
    let ids = Tensor::from_slice(wanted(&mine), counts[group.rank()], &Device::Cpu)?;
    let mut rest = group.all_gather_uneven(&ids, 0, &counts)?.to_vec1::<u32>()?;
    let mut all: Vec<Wanted> = counts.iter().rev().map(|&count| rest.split_off(rest.len() - count)).collect();
    all.reverse();
    Ok((mine, all))
}

/// Why a call cannot be made, of what the ranks say.
fn reason(ranks: &[usize], words: &[String], wrong: bool) -> String {
    let mut said = ranks.iter().zip(words);
    let first = said.clone().next();
    let worth = |(_, words): &(&usize, &String)| {
        if wrong { !words.is_empty() } else { Some(*words) != first.map(|(_, words)| words) }
    };
    match (said.find(worth), first) {
        (Some((rank, words)), _) if wrong => format!("rank {rank}: {words}"),
        (Some((rank, words)), Some((other, others))) => {
            format!("rank {rank} calls {words}, and rank {other} calls {others}; call the same on all ranks")
        }
        _ => "calls of the ranks differ".into(),
    }
}
