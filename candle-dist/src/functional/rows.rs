//! Rows of a dim that change hands: pieces become other pieces, or windows that overlap.
use crate::backend::{Fresh, Tensors};
use crate::call::{Call, Collective, Cut, Dims};
use crate::{ProcessGroup, Result, sum_dtype};
use candle_core::Tensor;
use std::ops::Range;
use std::panic::Location;

/// A window of the rows of a whole: rows before its first row, and behind its last one, are zeros.
type RowWindow = Range<isize>;

/// The rows of each rank under a cut.
fn pieces(cut: &Cut) -> Vec<Range<usize>> {
    (0..cut.sizes.len()).map(|rank| cut.piece(rank)).collect()
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// The rows of the whole that a window has.
fn inside(window: &RowWindow, len: usize) -> Range<usize> {
    let at = |at: isize| usize::try_from(at).unwrap_or(0).min(len);
    at(window.start)..at(window.end)
}

/// `part` as rows of `of`, which contains it.
fn within(part: &Range<usize>, of: &Range<usize>) -> Range<usize> {
    if part.is_empty() { 0..0 } else { part.start - of.start..part.end - of.start }
}

/// Some rows of a dim. candle panics on views without elements that start behind their memory.
pub(super) fn part(x: &Tensor, dim: usize, rows: &Range<usize>) -> candle_core::Result<Tensor> {
    let start = if rows.len() * x.elem_count() == 0 { 0 } else { rows.start };
    x.narrow(dim, start, rows.len())
}

/// The rows that are moved: those that rank `s` has and rank `r` wants, for each `s` and `r`.
struct RowMove<'a> {
    dim: usize,
    has: &'a [Range<usize>],
    wants: &'a [Range<usize>],
    group: &'a ProcessGroup,
    site: &'static Location<'static>,
    /// Whether there is a call also if no rows change hands.
    always: bool,
}

impl RowMove<'_> {
    fn count(&self, source: usize, target: usize) -> usize {
        if source == target { 0 } else { common(&self.has[source], &self.wants[target]).len() }
    }

    /// Sends rows of `x`, which has those of this rank, and returns those of each other rank that has some for this one.
    fn run(&self, x: &Tensor) -> Result<Vec<(usize, Tensor)>> {
        let (me, size, dim) = (self.group.rank(), self.group.size(), self.dim);
        let counts: Vec<Dims> =
            (0..size).map(|source| (0..size).map(|target| self.count(source, target)).collect()).collect();
        // All ranks know this alike.
        if !self.always && counts.iter().flatten().all(|&count| count == 0) {
            return Ok(Vec::new());
        }
        let rows_first = |x: &Tensor| x.transpose(0, dim)?.contiguous();
        let targets = (0..size).filter(|&target| counts[me][target] > 0);
        let sent = targets.map(|target| {
            let rows = within(&common(&self.has[me], &self.wants[target]), &self.has[me]);
            rows_first(&part(x, dim, &rows)?)
        });
        let sent = sent.collect::<candle_core::Result<Vec<_>>>()?;
        let sent = match &sent[..] {
            [] => rows_first(&x.narrow(dim, 0, 0)?)?,
            parts => Tensor::cat(parts, 0)?,
        };
        let call = Call { site: self.site, ..Call::on(Collective::AllToAllSingle(counts.clone()), &sent) };
        let made = self.group.exchange(call, std::slice::from_ref(&sent), Tensors::new())?;
        let got = made.and_then(|mut made| made.pop()).map_or(sent, Fresh::into_tensor);
        let mut start = 0;
        let sources = (0..size).filter(|&source| counts[source][me] > 0);
        let piece = |source: usize| {
            let len = counts[source][me];
            start += len;
            Ok((source, part(&got, 0, &(start - len..start))?.transpose(0, dim)?.contiguous()?))
        };
        sources.map(piece).collect()
    }
}

/// Returns this rank's piece under the cut `to`, from its piece under the cut `from` and the rows that others send.
pub(super) fn recut(
    x: &Tensor,
    from: &Cut,
    to: &Cut,
    group: &ProcessGroup,
    site: &'static Location<'static>,
) -> Result<Tensor> {
    let wanted: Vec<RowWindow> =
        pieces(to).into_iter().map(|rows| rows.start as isize..rows.end as isize).collect();
    gathered(x, from, &wanted, (group, site, true))
}

/// Returns this rank's window, from its piece under the cut and the rows that others send.
pub(super) fn windows(
    x: &Tensor,
    cut: &Cut,
    windows: &[RowWindow],
    group: &ProcessGroup,
    site: &'static Location<'static>,
) -> Result<Tensor> {
    gathered(x, cut, windows, (group, site, false))
}

fn gathered(
    x: &Tensor,
    cut: &Cut,
    windows: &[RowWindow],
    (group, site, always): (&ProcessGroup, &'static Location<'static>, bool),
) -> Result<Tensor> {
    let (has, len): (_, usize) = (pieces(cut), cut.len());
    let wants: Vec<Range<usize>> = windows.iter().map(|window| inside(window, len)).collect();
    let (me, dim) = (group.rank(), cut.dim);
    let got = RowMove { dim, has: &has, wants: &wants, group, site, always }.run(x)?;
    let own = common(&has[me], &wants[me]);
    let rows = within(&own, &has[me]);
    let zeros = |len: usize| {
        let mut shape = x.dims().to_vec();
        shape[dim] = len;
        Tensor::zeros(shape, x.dtype(), x.device())
    };
    let window = &windows[me];
    let before = (window.end.min(0) - window.start).max(0) as usize;
    let behind = (window.end - window.start.max(len as isize)).max(0) as usize;
    // Pieces follow each other in rank order, and so do the rows of a window.
    let mut parts = vec![zeros(before)?];
    let (lower, higher): (Vec<_>, Vec<_>) = got.into_iter().partition(|(source, _)| *source < me);
    parts.extend(lower.into_iter().map(|(_, part)| part));
    if !rows.is_empty() {
        parts.push(part(x, dim, &rows)?.contiguous()?);
    }
    parts.extend(higher.into_iter().map(|(_, part)| part));
    parts.push(zeros(behind)?);
    parts.retain(|part| part.dims()[dim] > 0);
    Ok(match &parts[..] {
        [] => zeros(0)?,
        parts => Tensor::cat(parts, dim)?.contiguous()?,
    })
}

/// Returns this rank's piece under the cut, in which each row is the sum of this row in all windows that have it.
///
/// The sums begin with this rank's window and go on with those of the others in rank order.
pub(super) fn sums_of_windows(
    x: &Tensor,
    cut: &Cut,
    windows: &[RowWindow],
    group: &ProcessGroup,
    site: &'static Location<'static>,
) -> Result<Tensor> {
    let (wants, len): (_, usize) = (pieces(cut), cut.len());
    let has: Vec<Range<usize>> = windows.iter().map(|window| inside(window, len)).collect();
    let (me, dim) = (group.rank(), cut.dim);
    // Without the zeros before and behind.
    let first = has[me].start as isize - windows[me].start;
    let first = if has[me].is_empty() { 0 } else { first as usize };
    let x = part(x, dim, &(first..first + has[me].len()))?;
    let got = RowMove { dim, has: &has, wants: &wants, group, site, always: false }.run(&x)?;
    let placed = |part: &Tensor, rows: &Range<usize>| {
        let at = within(rows, &wants[me]);
        part.contiguous()?.pad_with_zeros(dim, at.start, wants[me].len() - at.end)
    };
    let own = common(&has[me], &wants[me]);
    let rows = within(&own, &has[me]);
    let mut sum = match own.is_empty() {
        true => None,
        false => Some(placed(&part(&x, dim, &rows)?, &own)?),
    };
    // 16-bit floats are rounded once, however many windows a row is in.
    let wide = sum_dtype(x.dtype());
    for (source, part) in got {
        let part = placed(&part, &common(&has[source], &wants[me]))?;
        sum = Some(match sum {
            Some(sum) => (sum.to_dtype(wide)? + part.to_dtype(wide)?)?,
            None => part,
        });
    }
    let mut shape = x.dims().to_vec();
    shape[dim] = wants[me].len();
    Ok(match sum {
        Some(sum) => sum.to_dtype(x.dtype())?.contiguous()?,
        None => Tensor::zeros(shape, x.dtype(), x.device())?,
    })
}
