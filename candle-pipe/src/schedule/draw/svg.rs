//! SVG pictures.
use crate::schedule::{Pass, Span, Timeline};
use itertools::Itertools;

/// In pixels: the width of the longest timeline, the height of a rank, and the margin at the left.
const WIDTH: f64 = 1100.0;
const HEIGHT: f64 = 24.0;
const LEFT: f64 = 60.0;
/// The minimum width of a computation that shows its microbatch.
const LABEL: f64 = 9.0;
/// The approximate number of intervals of a time axis.
const TICKS: f64 = 10.0;

/// The passes, with their name in the legend and their hue.
const PASSES: [(Pass, &str, u32); 4] = [
    (Pass::Forward, "forward", 210),
    (Pass::Backward, "backward", 130),
    (Pass::Input, "input gradient", 170),
    (Pass::Weight, "weight gradient", 40),
];

/// Returns a self-contained SVG picture of timelines, one below the other at the same scale.
///
/// A rank is a row, and a computation is a box with the number of its microbatch. The color of a box is its pass, and
/// boxes of later stages of a rank are darker. A legend explains the colors, and each timeline has a time axis in the
/// unit of its spans. The background is white, so the picture is also readable on a dark page.
///
/// ```
/// use candle_pipe::schedule::{Costs, Edges, ScheduleKind, draw};
///
/// let schedule = ScheduleKind::OneFOneB.schedule(2, 4, 1)?;
/// let timeline = schedule.simulate(&Edges::chain(2), &Costs::per_rank(&[0, 1], 1.0, 1.0, 1.0))?;
/// let picture = draw::svg(&[("predicted", &timeline)]);
/// assert!(picture.starts_with("<svg ") && picture.contains("<title>0F0: 0 to 1</title>"));
/// # Ok::<(), candle_pipe::Error>(())
/// ```
pub fn svg(timelines: &[(&str, &Timeline)]) -> String {
    let longest = timelines.iter().map(|(_, timeline)| timeline.makespan()).fold(0.0, f64::max);
    let scale = if longest > 0.0 { WIDTH / longest } else { 0.0 };
    let mut body = legend(timelines);
    let mut top = HEIGHT * 1.25;
    for (title, timeline) in timelines {
        body +=
            &text(4.0, top + HEIGHT - 8.0, "start", &format!("{title}, {} long", shown(timeline.makespan())));
        top += HEIGHT;
        let origin = timeline.ranks.iter().flatten().map(|span| span.start).fold(f64::INFINITY, f64::min);
        for (rank, spans) in timeline.ranks.iter().enumerate() {
            body += &text(4.0, top + HEIGHT - 8.0, "start", &format!("rank {rank}"));
            let stages: Vec<usize> = stages(spans);
            body += &spans.iter().map(|span| block(span, &stages, origin, top, scale)).collect::<String>();
            top += HEIGHT;
        }
        body += &axis(timeline.makespan(), top, scale);
        top += HEIGHT * 1.5;
    }
    let width = LEFT + WIDTH + 24.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{top}\" viewBox=\"0 0 {width} {top}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<path d=\"M0 0H{width}V{top}H0Z\" fill=\"#fff\"/>\n{body}</svg>\n"
    )
}

/// Returns the stages of a rank, in the order of the model.
fn stages(spans: &[Span]) -> Vec<usize> {
    spans
        .iter()
        .flat_map(|span| span.action.computes())
        .map(|compute| compute.stage)
        .sorted()
        .dedup()
        .collect()
}

/// Draws a square and a name for each pass that occurs, and explains numbers and shades.
fn legend(timelines: &[(&str, &Timeline)]) -> String {
    let ranks = || timelines.iter().flat_map(|(_, timeline)| &timeline.ranks);
    let occurs =
        |pass: Pass| ranks().flatten().any(|span| span.action.computes().iter().any(|c| c.pass == pass));
    let (mut body, mut x) = (String::new(), LEFT);
    for (_, name, hue) in PASSES.into_iter().filter(|&(pass, ..)| occurs(pass)) {
        body += &format!("<path d=\"M{x:.1} 8h12v12h-12Z\" fill=\"{}\" stroke=\"#444\"/>\n", color(hue, 0));
        body += &text(x + 17.0, 18.0, "start", name);
        x += 30.0 + 6.5 * name.len() as f64;
    }
    let shades =
        if ranks().any(|spans| stages(spans).len() > 1) { "; darker: a later stage of the rank" } else { "" };
    body + &text(x, 18.0, "start", &format!("number: microbatch{shades}"))
}

/// Draws ticks from 0 to the end of a timeline, at 1, 2 or 5 times a power of ten.
fn axis(end: f64, top: f64, scale: f64) -> String {
    if end <= 0.0 {
        return String::new();
    }
    let power = 10f64.powf((end / TICKS).log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| end / step <= TICKS).unwrap_or(end);
    let ticks = (0..=(end / step + 1e-9) as usize).map(|i| {
        let (time, y) = (i as f64 * step, top + 1.0);
        let x = LEFT + time * scale;
        let label = text(x, y + 15.0, "middle", &shown(time));
        format!("<path d=\"M{x:.1} {y:.1}v4\" stroke=\"#444\"/>\n{label}")
    });
    let line = format!("<path d=\"M{LEFT} {:.1}h{:.1}\" stroke=\"#444\"/>\n", top + 1.0, end * scale);
    line + &text(4.0, top + 16.0, "start", "time") + &ticks.collect::<String>()
}

/// Draws a computation as a box with a title, and the number of its microbatch if it fits.
fn block(span: &Span, stages: &[usize], origin: f64, top: f64, scale: f64) -> String {
    let (start, end) = (span.start - origin, span.end - origin);
    let (x, width, height) = (LEFT + start * scale, (end - start) * scale, HEIGHT - 2.0);
    let (fill, number) =
        span.action.computes().first().map_or(("#ccc".to_owned(), String::new()), |compute| {
            let hue = PASSES.iter().find(|(pass, ..)| *pass == compute.pass).map_or(0, |&(.., hue)| hue);
            let later = stages.iter().position(|&stage| stage == compute.stage).unwrap_or(0);
            (color(hue, later), compute.microbatch.to_string())
        });
    let fits = width >= LABEL * number.len().max(1) as f64;
    let label =
        if fits { text(x + width / 2.0, top + HEIGHT - 9.0, "middle", &number) } else { String::new() };
    format!(
        "<g><title>{}: {} to {}</title>\n<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height}\" \
         fill=\"{fill}\" stroke=\"#fff\"/>\n{label}</g>\n",
        span.action,
        shown(start),
        shown(end),
    )
}

/// Returns the color of a pass, darker for each later stage of a rank.
fn color(hue: u32, later: usize) -> String {
    format!("hsl({hue}, 70%, {}%)", 78_usize.saturating_sub(18 * later).max(42))
}

/// Formats a time without trailing zeros.
fn shown(time: f64) -> String {
    let digits = format!("{time:.4}");
    digits.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn text(x: f64, y: f64, anchor: &str, words: &str) -> String {
    let escaped = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{escaped}</text>\n")
}
