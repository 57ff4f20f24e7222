//! Text pictures.
use super::{Bounds, Grid, named, shown};
use crate::Result;
use crate::layout::Spec;
use itertools::Itertools;

/// Returns a text picture of which rank holds which block of a tensor with one to three dims.
///
/// Row ranges run down, column ranges across; there is one table per range of the first of three dims. Ranks that hold
/// the same piece share a cell; ranks with an empty piece are listed below.
///
/// # Errors
/// If the tensor has no dims or more than three.
///
/// ```
/// use candle_core::DType;
/// use candle_dist::World;
/// use candle_shard::{Replicate, Result, Shard, Spec, visualize_sharding};
///
/// let pictures = World::threads(2).run(|ctx| -> Result<String> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     visualize_sharding(&Spec::new(&mesh, &[Shard(0)], (5, 4), DType::F32)?)
/// })?;
/// assert_eq!(pictures[0], "\
/// f32[5@tp, 4]
///        0..4
/// 0..3 | rank 0 |
/// 3..5 | rank 1 |
/// ");
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn visualize_sharding(spec: &Spec) -> Result<String> {
    let grid = Grid::new("visualize_sharding", spec)?;
    let mut picture = format!("{spec}\n");
    for &slice in &grid.slices {
        if spec.dims().len() == 3 {
            picture += &format!("[{}]\n", shown(slice));
        }
        picture += &table(&grid, slice);
    }
    if !grid.empty.is_empty() {
        picture += &format!("nothing on {}\n", named(&grid.empty));
    }
    Ok(picture)
}

fn table(grid: &Grid, slice: Bounds) -> String {
    let label_width = grid.rows.iter().map(|&row| shown(row).len()).max().unwrap_or(0);
    let held = |row: Bounds, column: Bounds| named(grid.held(slice, row, column));
    let width = |column: Bounds| {
        grid.rows.iter().map(|&row| held(row, column).len()).chain([shown(column).len()]).max().unwrap_or(0)
    };
    let heads =
        grid.columns.iter().map(|&column| format!(" {:w$}", shown(column), w = width(column))).join("  ");
    let mut table = format!("{:label_width$}  {}\n", "", heads.trim_end());
    for &row in &grid.rows {
        let line = grid
            .columns
            .iter()
            .map(|&column| format!("{:w$}", held(row, column), w = width(column)))
            .join(" | ");
        table += &format!("{:>label_width$} | {line} |\n", shown(row));
    }
    table
}
