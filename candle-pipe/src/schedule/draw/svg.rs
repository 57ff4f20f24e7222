//! Pictures for a browser.
use crate::schedule::{Pass, Span, Timeline};

/// The width of the longest timeline, the height of a rank, and the room around them, in pixels.
const WIDTH: f64 = 1200.0;
const HEIGHT: f64 = 24.0;
const MARGIN: f64 = 56.0;
/// The least width of a computation that is labelled.
const LABEL: f64 = 30.0;

/// An SVG picture of timelines one below the other at one scale, complete in itself.
///
/// A rank is a row and a computation a box in the colour of its pass, with a text for the pointer that rests on it.
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
    let (mut body, mut top) = (String::new(), 0.0);
    for (title, timeline) in timelines {
        body += &text(MARGIN, top + HEIGHT - 8.0, &format!("{title}, {} long", shown(timeline.makespan())));
        top += HEIGHT;
        let origin = timeline.ranks.iter().flatten().map(|span| span.start).fold(f64::INFINITY, f64::min);
        for (rank, spans) in timeline.ranks.iter().enumerate() {
            body += &text(4.0, top + HEIGHT - 8.0, &format!("rank {rank}"));
            body += &spans.iter().map(|span| block(span, origin, top, scale)).collect::<String>();
            top += HEIGHT;
        }
        top += HEIGHT / 2.0;
    }
    let width = MARGIN + WIDTH + 8.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{top}\" viewBox=\"0 0 {width} {top}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n{body}</svg>\n"
    )
}

/// A computation as a box with a title, and a label if it has room.
fn block(span: &Span, origin: f64, top: f64, scale: f64) -> String {
    let (start, end) = (span.start - origin, span.end - origin);
    let (x, width, height) = (MARGIN + start * scale, (end - start) * scale, HEIGHT - 2.0);
    let label = if width < LABEL { String::new() } else { text(x + 3.0, top + HEIGHT - 8.0, &span.action.to_string()) };
    format!(
        "<g><title>{}: {} to {}</title>\n<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height}\" \
         fill=\"{}\" stroke=\"#444\"/>\n{label}</g>\n",
        span.action,
        shown(start),
        shown(end),
        colour(span),
    )
}

/// A colour a pass, lighter for every second microbatch.
fn colour(span: &Span) -> String {
    let Some(compute) = span.action.computes().first() else { return "#ccc".to_owned() };
    let hue = match compute.pass {
        Pass::Forward => 210,
        Pass::Backward => 130,
        Pass::Input => 170,
        Pass::Weight => 40,
    };
    format!("hsl({hue}, 70%, {}%)", if compute.microbatch % 2 == 0 { 70 } else { 82 })
}

/// A time with no more digits than it needs.
fn shown(time: f64) -> String {
    let digits = format!("{time:.4}");
    digits.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn text(x: f64, y: f64, words: &str) -> String {
    let escaped = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\">{escaped}</text>\n")
}
