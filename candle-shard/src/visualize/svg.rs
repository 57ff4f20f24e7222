//! SVG pictures.
use super::{Bounds, Grid, named, shown};
use crate::Result;
use crate::layout::Spec;
use itertools::Itertools;

/// In pixels: the longer side of a slice, the minimum of its shorter side, the margin around slices, and the space
/// below.
const LONG: f64 = 320.0;
const SHORT: f64 = 48.0;
const MARGIN: f64 = 56.0;
const BELOW: f64 = 28.0;

/// Returns a self-contained SVG picture of which rank holds which block of a tensor with one to three dims.
///
/// Each block is drawn to scale in the colors of the ranks that hold it, with a tooltip. The numbers at the edges are
/// the global indices where blocks begin and end. Slices of the first of three dims are drawn side by side, and a line
/// below lists the ranks with empty shards. The background is white, so the picture is also readable on a dark page.
///
/// # Errors
/// If the tensor has no dims or more than three.
///
/// ```
/// use candle_core::DType;
/// use candle_dist::World;
/// use candle_shard::{Result, Shard, Spec, visualize_sharding_svg};
///
/// let pictures = World::threads(2).run(|ctx| -> Result<String> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     visualize_sharding_svg(&Spec::new(&mesh, &[Shard(1)], (5, 4), DType::F32)?)
/// })?;
/// assert!(pictures[0].starts_with("<svg ") && pictures[0].contains("<title>[0..5, 2..4]: rank 1</title>"));
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn visualize_sharding_svg(spec: &Spec) -> Result<String> {
    let grid = Grid::new("visualize_sharding_svg", spec)?;
    let end = |bounds: &[Bounds]| bounds.iter().map(|&(_, end)| end).max().unwrap_or(1) as f64;
    let (rows, columns) = (end(&grid.rows), end(&grid.columns));
    let longest = rows.max(columns);
    let scaled = |n: f64| (n / longest * LONG).max(SHORT);
    let scale = PixelScale { x: scaled(columns) / columns, y: scaled(rows) / rows };
    let step = scaled(columns) + MARGIN;
    let (width, height) = (MARGIN + step * grid.slices.len().max(1) as f64, scaled(rows) + MARGIN + BELOW);
    // The text of a spec may be wider than its picture.
    let width = width.max(MARGIN + 7.5 * spec.to_string().len() as f64);
    let mut body = text(8.0, 18.0, "start", &spec.to_string());
    for (i, &slice) in grid.slices.iter().enumerate() {
        let left = MARGIN + step * i as f64;
        if spec.dims().len() == 3 {
            body += &text(left, 34.0, "start", &format!("[{}]", shown(slice)));
        }
        body +=
            &edges(&grid.columns, |at| text(left + at * scale.x, MARGIN - 6.0, "middle", &at.to_string()));
        if spec.dims().len() > 1 {
            body += &edges(&grid.rows, |at| {
                text(left - 6.0, MARGIN + at * scale.y + 4.0, "end", &at.to_string())
            });
        }
        for (&row, &column) in grid.rows.iter().cartesian_product(&grid.columns) {
            body += &block(spec, &grid, [slice, row, column], left, scale);
        }
    }
    if !grid.empty.is_empty() {
        body += &text(8.0, height - 10.0, "start", &format!("nothing on {}", named(&grid.empty)));
    }
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <path d=\"M0 0H{width}V{height}H0Z\" fill=\"#fff\"/>\n{body}</svg>\n"
    ))
}

/// Pixels per element.
#[derive(Clone, Copy)]
struct PixelScale {
    x: f64,
    y: f64,
}

/// Draws a block as one vertical band per rank, with a frame, a label and a title.
fn block(spec: &Spec, grid: &Grid, place: [Bounds; 3], left: f64, scale: PixelScale) -> String {
    let [slice, row, column] = place;
    let ranks = grid.held(slice, row, column);
    let (x, y) = (left + column.0 as f64 * scale.x, MARGIN + row.0 as f64 * scale.y);
    let (width, height) = ((column.1 - column.0) as f64 * scale.x, (row.1 - row.0) as f64 * scale.y);
    let band = width / ranks.len().max(1) as f64;
    let bands = ranks.iter().enumerate().map(|(i, &rank)| {
        let (x, hue) = (x + band * i as f64, 360 * rank / spec.mesh().size());
        format!(
            "<rect class=\"rank-{rank}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{band:.1}\" height=\"{height:.1}\" \
             fill=\"hsl({hue}, 70%, 78%)\"/>\n"
        )
    });
    let ranges = place[3 - spec.dims().len()..].iter().map(|&bounds| shown(bounds)).join(", ");
    let frame = format!(
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"none\" stroke=\"#444\"/>\n"
    );
    let label = text(x + 4.0, y + 15.0, "start", &named(ranks));
    format!(
        "<g><title>[{ranges}]: {}</title>\n{}{frame}{label}</g>\n",
        named(ranks),
        bands.collect::<String>()
    )
}

/// Draws each index where a block begins or ends with `draw`.
fn edges(bounds: &[Bounds], draw: impl Fn(f64) -> String) -> String {
    let ends = bounds.iter().flat_map(|&(start, end)| [start, end]).sorted().dedup();
    ends.map(|at| draw(at as f64)).collect()
}

fn text(x: f64, y: f64, anchor: &str, words: &str) -> String {
    let escaped = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{escaped}</text>\n")
}
