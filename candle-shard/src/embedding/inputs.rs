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

/// What the ranks look up.
pub(crate) struct Inputs {
    /// Every rank's ids, in rank order.
    pub(crate) wanted: Vec<Wanted>,
    /// Whether the rows have a gradient, also on ranks that hold nothing of the table.
    pub(crate) tracked: bool,
}

/// A rank's arguments, as far as the others must know them.
pub(crate) trait Tell {
    fn wanted(&self) -> &Wanted;

    /// Whether the part of the table here has a gradient; `None` if there is no part.
    fn tracked(&self) -> Option<bool>;
}

/// Tells all ranks what each of them looks up.
///
/// `call` describes what must be alike on all ranks. Two small collectives.
///
/// # Errors
/// On all ranks alike, if the arguments of some were wrong or their calls differ; nothing has happened then.
pub(crate) fn gather_inputs<T: Tell>(
    op: &'static str,
    group: &ProcessGroup,
    call: &str,
    mine: Result<T, Wrong>,
) -> Result<(T, Inputs)> {
    let mut hash = DefaultHasher::new();
    (op, call).hash(&mut hash);
    let said = mine.as_ref().ok();
    let count = said.map_or(-1, |mine| mine.wanted().len() as i64);
    let tracked = said.and_then(Tell::tracked).map_or(-1, i64::from);
    let header = Tensor::new(&[count, hash.finish() as i64, tracked], &Device::Cpu)?;
    let headers = group.all_gather(&header, 0)?.to_vec1::<i64>()?;
    let headers = || headers.iter().copied().tuples::<(_, _, _)>();
    let known = || headers().map(|(.., tracked)| tracked).filter(|&tracked| tracked >= 0);
    let wrong = headers().any(|(count, ..)| count < 0);
    if wrong || !headers().map(|(_, hash, _)| hash).all_equal() || !known().all_equal() {
        let gradient = if tracked == 1 { "with" } else { "without" };
        let words = if wrong { mine.err().unwrap_or_default() } else { format!("{op} {call} {gradient} gradient") };
        let words = group.all_gather_text(&words)?;
        return Err(Error::Op { op, reason: reason(group.ranks(), &words, wrong) });
    }
    let mine = mine.or_else(|reason| Error::op(op, reason))?;
    let counts: Vec<usize> = headers().map(|(count, ..)| count as usize).collect();
    let ids = Tensor::from_slice(mine.wanted(), counts[group.rank()], &Device::Cpu)?;
    let mut rest = group.all_gather_uneven(&ids, 0, &counts)?.to_vec1::<u32>()?;
    let mut wanted: Vec<Wanted> = counts.iter().rev().map(|&count| rest.split_off(rest.len() - count)).collect();
    wanted.reverse();
    Ok((mine, Inputs { wanted, tracked: known().next() == Some(1) }))
}

/// Why a call cannot be made, of what the ranks say.
fn reason(ranks: &[usize], words: &[String], wrong: bool) -> String {
    let others = if wrong { "" } else { words[0].as_str() };
    match ranks.iter().zip(words).find(|(_, words)| *words != others) {
        Some((rank, words)) if wrong => format!("rank {rank}: {words}"),
        Some((rank, words)) => {
            format!("rank {rank} calls {words}, and rank {} calls {others}; call the same on all ranks", ranks[0])
        }
        None => "a rank holds nothing of the table, and its call differs; call the same on all ranks".into(),
    }
}
