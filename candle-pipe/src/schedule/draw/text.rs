//! Text pictures.
use crate::schedule::Timeline;
use itertools::Itertools;

/// The most lines of a picture.
const LINES: f64 = 1000.0;

/// Draws the computations as text, one column per rank and one line per duration of the shortest computation.
///
/// A computation that continues has `|` in the lines below; an idle rank is blank. A line is at least a thousandth of
/// the total time, so computations that are much shorter than others may be omitted.
///
/// ```
/// use candle_pipe::schedule::{Costs, Edges, ScheduleKind, draw};
///
/// let schedule = ScheduleKind::GPipe.schedule(2, 1, 1)?;
/// let timeline = schedule.simulate(&Edges::chain(2), &Costs::per_rank(&[0, 1], 1.0, 0.5, 0.5))?;
/// assert_eq!(draw::text(&timeline), "rank 0  rank 1\n0F0\n        1F0\n        1B0\n0B0\n");
/// # Ok::<(), candle_pipe::Error>(())
/// ```
pub fn text(timeline: &Timeline) -> String {
    let spans = || timeline.ranks.iter().flatten();
    let lengths = spans().map(|span| span.end - span.start).filter(|&length| length > 0.0);
    let Some(shortest) = lengths.min_by(f64::total_cmp) else { return String::new() };
    let origin = spans().map(|span| span.start).fold(f64::INFINITY, f64::min);
    let unit = shortest.max(timeline.makespan() / LINES);
    let lines = (timeline.makespan() / unit).round() as usize;
    let title = |rank: usize| format!("rank {rank}");
    let label = spans().map(|span| span.action.to_string().len()).max().unwrap_or(0);
    let width = label.max(title(timeline.ranks.len().saturating_sub(1)).len()) + 2;
    // For each rank: the index of the computation that is drawn or comes next, and whether it is drawn.
    let mut next = vec![(0, false); timeline.ranks.len()];
    let mut line = |i: usize| {
        let middle = origin + (i as f64 + 0.5) * unit;
        let cells = timeline.ranks.iter().zip(&mut next).map(|(spans, (at, drawn))| {
            while spans.get(*at).is_some_and(|span| span.end <= middle) {
                (*at, *drawn) = (*at + 1, false);
            }
            match spans.get(*at).filter(|span| span.start <= middle) {
                Some(span) if !*drawn => {
                    *drawn = true;
                    span.action.to_string()
                }
                Some(_) => "|".to_owned(),
                None => String::new(),
            }
        });
        row(cells, width)
    };
    let head = row((0..timeline.ranks.len()).map(title), width);
    head + &(0..lines).map(&mut line).collect::<String>()
}

fn row(cells: impl Iterator<Item = String>, width: usize) -> String {
    let row = cells.map(|cell| format!("{cell:width$}")).join("");
    row.trim_end().to_owned() + "\n"
}
