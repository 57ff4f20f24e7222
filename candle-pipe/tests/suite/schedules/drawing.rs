//! Pictures, and what they are made of.
use super::{schedule, simulated};
use candle_pipe::schedule::{Action, Span, Timeline, draw};
use serde_json::Value;

#[test]
fn text_is_a_line_a_step() {
    let timeline = simulated(&schedule("1f1b", 2, 2, 1), [1.0, 1.0, 1.0], 0.0);
    let want = "rank 0  rank 1\n0F0\n0F1     1F0\n        1B0\n        |\n0B0     1F1\n|       1B1\n        |\n0B1\n|\n";
    assert_eq!(draw::text(&timeline), want);
    assert_eq!(draw::text(&Timeline::empty(2)), "");
}

#[test]
fn text_has_every_computation_whatever_it_costs() {
    let timeline = simulated(&schedule("zbv", 4, 8, 2), [1.0, 1.2, 0.8], 0.05);
    let drawn = draw::text(&timeline);
    for span in timeline.ranks.iter().flatten() {
        assert_eq!(drawn.split_whitespace().filter(|word| *word == span.action.to_string()).count(), 1);
    }
}

#[test]
fn text_stays_of_a_size_where_a_computation_takes_almost_no_time() {
    let span = |text: &str, start, end| Span { action: text.parse::<Action>().unwrap(), start, end };
    let mut timeline = Timeline::empty(1);
    timeline.ranks[0] = vec![span("0F0", 5.0, 5.0), span("0F1", 5.0, 5.0 + 1e-12), span("0F2", 6.0, 7.0)];
    let drawn = draw::text(&timeline);
    assert!(drawn.lines().count() <= 1001 && drawn.contains("0F2"));
}

#[test]
fn svg_has_every_computation_of_every_timeline() {
    let predicted = simulated(&schedule("dualpipev", 2, 4, 2), [1.0; 3], 0.0);
    let measured = simulated(&schedule("dualpipev", 2, 4, 2), [1.0, 1.5, 1.0], 0.1);
    let picture = draw::svg(&[("predicted", &predicted), ("a <b> & c", &measured)]);
    let spans = predicted.ranks.iter().chain(&measured.ranks).map(Vec::len).sum::<usize>();
    assert_eq!(picture.matches("<rect ").count(), spans);
    assert!(picture.contains("a &lt;b&gt; &amp; c, ") && picture.ends_with("</svg>\n"));
    for named in ["forward", "backward", "input gradient", "weight gradient", "number: microbatch; darker"] {
        assert!(picture.contains(&format!(">{named}")), "{named} in {picture}");
    }
    // An axis from 0 for each timeline.
    assert_eq!(picture.matches(">time</text>").count(), 2);
    assert_eq!(picture.matches("text-anchor=\"middle\">0</text>\n<path").count(), 2, "{picture}");
    assert!(!picture.contains("NaN") && !picture.contains("inf"));
    assert!(!draw::svg(&[("nothing", &Timeline::empty(2))]).contains("NaN"));
}

#[test]
fn svg_numbers_microbatches_and_marks_time_in_round_steps() {
    let timeline = simulated(&schedule("1f1b", 2, 2, 1), [1.0, 1.0, 1.0], 0.0);
    let picture = draw::svg(&[("1f1b", &timeline)]);
    // 9 units long: 0, 1, ... 9 on the axis, and each of 4 passes of 2 microbatches with its number.
    for tick in 0..=9 {
        let x = 60.0 + f64::from(tick) * 1100.0 / 9.0;
        assert!(
            picture.contains(&format!("<text x=\"{x:.1}\" y=\"118.0\" text-anchor=\"middle\">{tick}<")),
            "{picture}"
        );
    }
    let numbered = picture.matches("stroke=\"#fff\"/>\n<text").count();
    assert_eq!(numbered, 8);
    assert!(!picture.contains("darker") && !picture.contains("weight gradient"));
}

#[test]
fn chrome_has_every_event_and_begins_at_0() {
    let mut timeline = simulated(&schedule("zb-h1", 3, 4, 1), [1.0; 3], 0.5);
    let shift = |spans: &mut Vec<Span>| {
        for span in spans {
            (span.start, span.end) = (span.start + 100.0, span.end + 100.0);
        }
    };
    timeline.ranks.iter_mut().chain(&mut timeline.transfers).for_each(shift);
    let mut json = Vec::new();
    draw::write_chrome(&mut json, &[("predicted", &timeline), ("nothing", &Timeline::empty(1))]).unwrap();
    let trace: Value = serde_json::from_slice(&json).unwrap();
    let events: Vec<_> =
        trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X").collect();
    let spans = timeline.ranks.iter().chain(&timeline.transfers).map(Vec::len).sum::<usize>();
    assert_eq!(events.len(), spans);
    assert_eq!(
        (&events[0]["name"], &events[0]["ts"], &events[0]["dur"]),
        (&"0F0".into(), &0.0.into(), &1e6.into())
    );
    assert!(events.iter().any(|event| event["cat"] == "communication" && event["name"] == "0SEND_F0"));
}
