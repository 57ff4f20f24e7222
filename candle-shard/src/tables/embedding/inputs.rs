//! Step 1: all ranks learn which rows each rank looks up, or all return the same error.
use crate::lookup::ArgumentError;
use crate::{Error, Result, kernels};
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, Cut, ProcessGroup};
use itertools::Itertools;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Ids without duplicates, in ascending order.
pub(super) type SortedIds = Vec<u32>;

/// This rank's ids, without duplicates, and the index of each id in that list.
pub(super) struct Ids {
    pub(super) wanted: SortedIds,
    /// For each id its index in `wanted`.
    pub(super) places: Vec<u32>,
}

impl Ids {
    /// Reads the elements of `ids` in row-major order, which must be rows of a table with `rows` rows.
    pub(super) fn read(ids: &Tensor, rows: usize) -> Result<Self, ArgumentError> {
        if !matches!(ids.dtype(), DType::U8 | DType::U32 | DType::I64) {
            return Err(format!("ids are {}; give u8, u32 or i64", ids.dtype().as_str()));
        }
        let words = |error: candle_core::Error| error.to_string();
        let ids =
            ids.flatten_all().and_then(|ids| ids.to_dtype(DType::I64)?.to_vec1::<i64>()).map_err(words)?;
        if let Some(bad) = ids.iter().find(|&&id| id < 0 || id as u64 >= rows as u64) {
            return Err(format!("id {bad} is out of range for a table of {rows} rows"));
        }
        let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
        let (wanted, places) = kernels::unique_rows_and_places(&ids);
        Ok(Self { wanted, places })
    }
}

/// The rows that the ranks look up.
pub(super) struct LookupInputs {
    /// The ids of every rank, in rank order.
    pub(super) wanted: Vec<SortedIds>,
    /// Whether the rows have a gradient, also on ranks without a part of the table.
    pub(super) tracked: bool,
}

/// A call with valid arguments on this rank: its ids, whether the local part of the table has a gradient (`None` if there is no local
/// part), and what only this rank needs.
pub(super) type EmbeddingCall<T> = (Ids, Option<bool>, T);

/// Exchanges which rows each rank looks up.
///
/// `call` describes the arguments that must be equal on all ranks. Runs two small collectives.
///
/// # Errors
/// On all ranks alike, if the arguments of some ranks are wrong or the calls differ; nothing has changed then.
pub(super) fn gather_inputs<T>(
    op: &'static str,
    group: &ProcessGroup,
    call: &str,
    mine: Result<EmbeddingCall<T>, ArgumentError>,
) -> Result<(Ids, LookupInputs, T)> {
    let mut hash = DefaultHasher::new();
    (op, call).hash(&mut hash);
    let said = mine.as_ref().ok();
    let count = said.map_or(-1, |(ids, ..)| ids.wanted.len() as i64);
    let tracked = said.and_then(|(_, tracked, _)| *tracked).map_or(-1, i64::from);
    let header = Tensor::new(&[count, hash.finish() as i64, tracked], &Device::Cpu)?;
    let headers = group.all_gather(&header, 0)?.to_vec1::<i64>()?;
    let headers = || headers.iter().copied().tuples::<(_, _, _)>();
    let known = || headers().map(|(.., tracked)| tracked).filter(|&tracked| tracked >= 0);
    let wrong = headers().any(|(count, ..)| count < 0);
    if wrong || !headers().map(|(_, hash, _)| hash).all_equal() || !known().all_equal() {
        let gradient = if tracked == 1 { "with" } else { "without" };
        let words =
            if wrong { mine.err().unwrap_or_default() } else { format!("{op} {call} {gradient} gradient") };
        let words = group.all_gather_text(&words)?;
        return Err(Error::Op { op, reason: reason(group.ranks(), &words, wrong) });
    }
    let (mine, _, more) = mine.or_else(|reason| Error::op(op, reason))?;
    let counts: Vec<usize> = headers().map(|(count, ..)| count as usize).collect();
    let ids = Tensor::from_slice(&mine.wanted, counts[group.rank()], &Device::Cpu)?;
    let mut rest = group.call(Collective::all_gather(Cut::new(0, &counts))).run(&ids)?.to_vec1::<u32>()?;
    let mut wanted: Vec<SortedIds> =
        counts.iter().rev().map(|&count| rest.split_off(rest.len() - count)).collect();
    wanted.reverse();
    Ok((mine, LookupInputs { wanted, tracked: known().next() == Some(1) }, more))
}

/// Builds the error message from the messages of all ranks.
fn reason(ranks: &[usize], words: &[String], wrong: bool) -> String {
    let others = if wrong { "" } else { words[0].as_str() };
    match ranks.iter().zip(words).find(|(_, words)| *words != others) {
        Some((rank, words)) if wrong => format!("rank {rank}: {words}"),
        Some((rank, words)) => {
            format!(
                "rank {rank} calls {words}, and rank {} calls {others}; call the same on all ranks",
                ranks[0]
            )
        }
        None => "a rank holds nothing of the table, and its call differs; call the same on all ranks".into(),
    }
}
