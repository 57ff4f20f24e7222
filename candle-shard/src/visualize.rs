//! Pictures of how a tensor lies on its mesh.
use crate::spec::Spec;
use crate::{Error, Result};
use itertools::Itertools;
use std::collections::BTreeMap;
use std::ops::Range;

/// A text picture of which rank holds what of a tensor of one or two dims: row ranges down, column ranges across.
///
/// Ranks that hold the same piece stand together; ranks with an empty piece are named below.
///
/// # Errors
/// If the tensor has no dim or more than two.
///
/// ```
/// use candle_core::DType;
/// use candle_dist::World;
/// use candle_shard::{Replicate, Result, Shard, Spec, visualize_sharding};
///
/// let pictures = World::local(2).run(|ctx| -> Result<String> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     visualize_sharding(&Spec::new(&mesh, &[Shard(0)], (5, 4), DType::F32)?)
/// })?;
/// assert_eq!(pictures[0], "\
/// f32[5, 4] (tp=S(0))
///        0..4
/// 0..3 | rank 0 |
/// 3..5 | rank 1 |
/// ");
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn visualize_sharding(spec: &Spec) -> Result<String> {
    if !matches!(spec.dims().len(), 1 | 2) {
        return Error::op("visualize_sharding", format!("{spec} has {} dims; want 1 or 2", spec.dims().len()));
    }
    let mut cells: BTreeMap<(Bounds, Bounds), Vec<usize>> = BTreeMap::new();
    let mut empty = Vec::new();
    for rank in 0..spec.mesh().size() {
        let block = spec.block_at(&spec.mesh().coordinate_of(rank));
        let (rows, columns) = match &block[..] {
            [columns] => (0..1, columns.clone()),
            [rows, columns, ..] => (rows.clone(), columns.clone()),
            [] => (0..1, 0..1),
        };
        match rows.is_empty() || columns.is_empty() {
            true => empty.push(rank),
            false => cells.entry((bounds(&rows), bounds(&columns))).or_default().push(rank),
        }
    }
    let rows: Vec<Bounds> = cells.keys().map(|(row, _)| *row).sorted().dedup().collect();
    let columns: Vec<Bounds> = cells.keys().map(|(_, column)| *column).sorted().dedup().collect();
    let held = |row: &Bounds, column: &Bounds| cells.get(&(*row, *column)).map_or(String::new(), |ranks| named(ranks));
    let shown = |(start, end): &Bounds| format!("{start}..{end}");
    let label_width = rows.iter().map(|row| shown(row).len()).max().unwrap_or(0);
    let width = |column: &Bounds| {
        rows.iter().map(|row| held(row, column).len()).chain([shown(column).len()]).max().unwrap_or(0)
    };
    let mut picture = format!("{spec}\n{:label_width$}  ", "");
    let heads = columns.iter().map(|column| format!(" {:w$}", shown(column), w = width(column))).join("  ");
    picture += &format!("{}\n", heads.trim_end());
    for row in &rows {
        let line = columns.iter().map(|column| format!("{:w$}", held(row, column), w = width(column))).join(" | ");
        picture += &format!("{:>label_width$} | {line} |\n", shown(row));
    }
    if !empty.is_empty() {
        picture += &format!("nothing on {}\n", named(&empty));
    }
    Ok(picture)
}

type Bounds = (usize, usize);

fn bounds(range: &Range<usize>) -> Bounds {
    (range.start, range.end)
}

fn named(ranks: &[usize]) -> String {
    format!("rank{} {}", if ranks.len() > 1 { "s" } else { "" }, ranks.iter().join(", "))
}
