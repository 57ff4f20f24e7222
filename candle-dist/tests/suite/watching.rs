//! Observing a rank's own communication: counts, events, traces.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::comm::{self, CommCounts, Count, Event, Log, Part, trace};
use candle_dist::functional::Step;
use candle_dist::{Collective, Cut, Op, RankContext, ReduceOp, Result};
use serde_json::Value;
use std::fmt::Debug;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use test_utils::{Ranks, on_ranks};
use tracing::dispatcher::with_default;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Metadata, Subscriber};

fn x() -> Tensor {
    Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap()
}

/// Runs every op once, on a world of two. Returns the line above the first call.
fn every_op(ctx: &RankContext) -> Result<u32> {
    let (g, peer) = (ctx.group(), 1 - ctx.rank());
    let line = line!();
    g.all_reduce(&x(), ReduceOp::Sum)?;
    g.all_gather(&x().t()?, 0)?;
    g.reduce_scatter(&x(), 0, ReduceOp::Sum)?;
    g.all_to_all(&x(), 0, 1)?;
    g.broadcast(&x(), 1)?;
    g.reduce(&x(), 1, ReduceOp::Max)?;
    g.scatter((ctx.rank() == 0).then(x).as_ref(), ((2, 3), DType::F32), 0, &[1, 1], 0)?;
    g.gather(&x(), 0, &[2, 2], 1)?;
    g.send(&x().to_dtype(DType::F64)?, peer)?;
    g.recv((2, 3), DType::F64, peer)?;
    g.barrier()?;
    Ok(line)
}

const OPS: [Op; 11] = [
    Op::AllReduce,
    Op::AllGather,
    Op::ReduceScatter,
    Op::AllToAll,
    Op::Broadcast,
    Op::Reduce,
    Op::Scatter,
    Op::Gather,
    Op::Send,
    Op::Recv,
    Op::Barrier,
];

#[test]
fn every_op_is_an_event_with_its_group_bytes_and_site() {
    on_ranks(2, "events", |ctx| -> Result<()> {
        let (line, events) = Log::of(|| every_op(ctx));
        let line = line?;
        assert_eq!(events.iter().map(|event| event.op).collect::<Vec<_>>(), OPS);
        let scattered = if ctx.rank() == 0 { 24 } else { 0 };
        let bytes: Vec<usize> = events.iter().map(|event| event.bytes).collect();
        assert_eq!(bytes, [24, 24, 24, 24, 24, 24, scattered, 24, 48, 0, 0]);
        let peer = Some(1 - ctx.rank());
        let peers: Vec<_> = events.iter().map(|event| event.peer).collect();
        assert_eq!(peers, [None, None, None, None, Some(1), Some(1), Some(0), Some(1), peer, peer, None]);
        for (i, event) in events.iter().enumerate() {
            assert_eq!(event.ranks.as_slice(), [0, 1]);
            assert_eq!((event.site.file(), event.site.line()), (file!(), line + 1 + i as u32));
        }
        // In order: no call begins before the previous one has ended.
        assert!(events.windows(2).all(|pair| pair[0].start + pair[0].duration <= pair[1].start));
        Ok(())
    });
}

#[test]
fn the_events_of_a_collective_overlap() {
    let spans = on_ranks(2, "overlap", |ctx| -> Result<_> {
        if ctx.rank() == 0 {
            std::thread::sleep(std::time::Duration::from_millis(20)); // rank 1 has to wait
        }
        let (met, events) = Log::of(|| ctx.group().barrier());
        met.map(|()| (events[0].start, events[0].start + events[0].duration))
    });
    // No rank leaves before the last one has arrived.
    let (last_begin, first_end) = (spans[0].0.max(spans[1].0), spans[0].1.min(spans[1].1));
    assert!(first_end >= last_begin, "{spans:?}");
}

#[test]
fn a_call_that_is_started_shows_its_start_and_its_wait() {
    let waits = on_ranks(2, "start and wait", |ctx| -> Result<_> {
        let (made, counts) = comm::record(|| {
            Log::of(|| {
                let pending = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x())?;
                if ctx.rank() == 0 {
                    ctx.group().send(&x(), 1)?; // the other rank starts after it
                }
                pending.wait()
            })
        });
        let (sum, events) = made;
        sum?;
        let parts: Vec<_> =
            events.iter().filter(|e| e.op == Op::AllReduce).map(|e| (e.part, e.bytes)).collect();
        assert_eq!(parts, [(Part::Start, 24), (Part::Wait, 0)]);
        let Count { count, bytes, .. } = counts.get(Op::AllReduce);
        assert_eq!((count, bytes), (1, 24));
        if ctx.rank() == 1 {
            ctx.group().recv((2, 3), DType::F32, 0)?;
        }
        let mut json = Vec::new();
        trace::write_chrome(&mut json, &[(ctx.rank(), events)]).unwrap();
        let text = String::from_utf8(json).unwrap();
        Ok((text.contains("all_reduce start"), text.contains("all_reduce wait")))
    });
    assert_eq!(waits, [(true, true); 2]);
}

#[test]
fn groups_are_named_by_their_ranks_in_the_world() {
    on_ranks(4, "subgroup events", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let ((), events) = Log::of(|| {
            mesh.axis_group("dp").unwrap().barrier().unwrap();
            mesh.axis_group("tp").unwrap().all_reduce(&x(), ReduceOp::Sum).unwrap();
        });
        let (dp, tp) = (ctx.rank() / 2, ctx.rank() % 2);
        assert_eq!(events[0].ranks.as_slice(), [tp, 2 + tp]);
        assert_eq!(events[1].ranks.as_slice(), [2 * dp, 2 * dp + 1]);
        Ok(())
    });
}

#[test]
fn a_backward_pass_is_logged_where_its_forward_was_called() {
    on_ranks(2, "backward", |ctx| -> Result<()> {
        let v = Var::from_tensor(&x())?;
        let log = Log::start();
        let line = line!() + 1;
        let whole = Step::AllGather { cut: Cut::new(0, &[2, 2]), varying: true }.apply(&v, ctx.group())?;
        let loss = whole.sqr()?.sum_all()?;
        assert_eq!(log.events().len(), 1);
        loss.backward()?;
        let events = log.finish();
        let seen: Vec<_> = events.iter().map(|event| (event.op, event.bytes, event.site.line())).collect();
        assert_eq!(seen, [(Op::AllGather, 24, line), (Op::ReduceScatter, 48, line)]);
        assert!(events.iter().all(|event| event.site.file() == file!()));
        Ok(())
    });
}

#[test]
fn scopes_nest_and_close_in_any_order() {
    on_ranks(2, "nesting", |ctx| -> Result<()> {
        let g = ctx.group();
        let ops = |events: &[Event]| events.iter().map(|event| event.op).collect::<Vec<_>>();
        let outer = Log::start();
        g.barrier()?;
        let inner = Log::start();
        let (result, counts) = comm::record(|| g.all_reduce(&x(), ReduceOp::Sum));
        result?;
        let counts: Vec<_> =
            counts.iter().map(|(op, Count { count, bytes, .. })| (op, count, bytes)).collect();
        assert_eq!(counts, [(Op::AllReduce, 1, 24)]);
        assert_eq!(ops(&outer.finish()), [Op::Barrier, Op::AllReduce]);
        g.all_gather(&x(), 0)?;
        assert_eq!(ops(&inner.events()), [Op::AllReduce, Op::AllGather]);
        drop(inner);
        // No scope is open any more.
        g.barrier()?;
        let ((), events) = Log::of(|| ());
        assert!(events.is_empty());
        Ok(())
    });
}

#[test]
fn a_log_sees_its_own_thread_only_and_a_group_of_one_is_silent() {
    on_ranks(2, "threads", |ctx| -> Result<()> {
        let log = (ctx.rank() == 0).then(Log::start);
        ctx.group().barrier()?;
        assert_eq!(log.map(|log| log.finish().len()), (ctx.rank() == 0).then_some(1));
        Ok(())
    });
    on_ranks(1, "alone", |ctx| -> Result<()> {
        let (made, events) =
            Log::of(|| ctx.group().all_reduce(&x(), ReduceOp::Sum).and(ctx.group().barrier()));
        assert!(events.is_empty());
        made
    });
}

#[test]
fn failed_calls_and_panics_leave_a_true_record() {
    let seen = Ranks::new(2, "failure").run(|ctx| -> Result<(usize, usize)> {
        // Refused before anything is sent, so there is no communication.
        let (refused, none) = Log::of(|| ctx.group().broadcast(&x(), 9));
        refused.unwrap_err();
        // Different calls fail: one event each.
        let root = ctx.rank();
        let (failed, one) = Log::of(|| ctx.group().broadcast(&x(), root));
        failed.unwrap_err();
        // A panic closes the scopes that it unwinds.
        let quiet = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let _log = Log::start();
            comm::record(|| std::panic::resume_unwind(Box::new("through the scopes"))).1
        }));
        assert!(quiet.is_err());
        let (_, after) = comm::record(|| ctx.group().barrier().unwrap_err());
        assert_eq!(after.get(Op::Barrier).count, 1);
        Ok((none.len(), one.len()))
    });
    assert_eq!(seen.unwrap(), [(0, 1), (0, 1)]);
}

#[test]
fn counts_print_as_a_line_and_as_a_table() {
    let counts = on_ranks(2, "table", |ctx| -> Result<CommCounts> {
        let (done, counts) = comm::record(|| -> Result<()> {
            ctx.group().all_reduce(&x(), ReduceOp::Sum)?;
            ctx.group().all_reduce(&Tensor::zeros((600, 500), DType::F32, &Device::Cpu)?, ReduceOp::Sum)?;
            ctx.group().barrier()
        });
        done.map(|()| counts)
    });
    assert_eq!((counts[0].total(), counts[0].total_bytes()), (3, 1_200_024));
    assert_eq!(counts[0].to_string(), "2 all_reduce (1200024 B), 1 barrier (0 B)");
    let table = "\
op               calls   bytes
all_reduce           2 1200024
barrier              1       0
total                3 1200024";
    assert_eq!(format!("{:#}", counts[0]), table);
    assert_eq!(CommCounts::default().to_string(), "no communication");
}

#[test]
fn a_trace_has_a_row_for_every_rank() {
    let events = on_ranks(2, "trace", |ctx| -> Result<(usize, Vec<Event>)> {
        let (done, events) = Log::of(|| every_op(ctx));
        done.map(|_| (ctx.rank(), events))
    });
    let mut json = Vec::new();
    trace::write_chrome(&mut json, &events).unwrap();
    let trace: Value = serde_json::from_slice(&json).unwrap();
    let rows = trace["traceEvents"].as_array().unwrap();
    let calls: Vec<&Value> = rows.iter().filter(|row| row["ph"] == "X").collect();
    assert_eq!(calls.len(), 2 * OPS.len());
    let begin = |call: &Value| call["ts"].as_f64().unwrap();
    let first = calls.iter().map(|call| begin(call)).fold(f64::INFINITY, f64::min);
    assert_eq!(first, 0.0);
    for (rank, events) in &events {
        let title = rows.iter().find(|row| row["name"] == "process_name" && row["pid"] == *rank).unwrap();
        assert_eq!(title["args"]["name"], format!("rank {rank}"));
        let row: Vec<_> = calls.iter().filter(|call| call["pid"] == *rank).collect();
        assert_eq!(row.len(), events.len());
        for (call, event) in row.iter().zip(events) {
            assert_eq!((&call["name"], &call["tid"]), (&Value::from(event.op.name()), &Value::from(0)));
            assert_eq!(call["args"]["bytes"], event.bytes);
            assert_eq!(call["args"]["group"], serde_json::json!([0, 1]));
            assert_eq!(call["args"]["peer"].as_u64(), event.peer.map(|peer| peer as u64));
            assert_eq!(call["args"]["site"], format!("{}:{}", event.site.file(), event.site.line()));
            let us = call["dur"].as_f64().unwrap();
            assert!((us - event.duration.as_secs_f64() * 1e6).abs() < 1e-6, "{us}");
        }
        // Microseconds between calls agree with the clock.
        let between = events[10].start - events[0].start;
        assert!((begin(row[10]) - begin(row[0]) - between.as_secs_f64() * 1e6).abs() < 1e-3);
    }
}

#[test]
fn a_trace_goes_to_a_file_and_may_be_empty() {
    let path = std::env::temp_dir().join(format!("candle-dist-trace-{}.json", std::process::id()));
    trace::save_chrome(&path, &[(3, Vec::new())]).unwrap();
    let trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    let rows = trace["traceEvents"].as_array().unwrap();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["ph"] == "M" && row["pid"] == 3));
    let mut json = Vec::new();
    trace::write_chrome(&mut json, &[]).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&json).unwrap()["traceEvents"], serde_json::json!([]));
    assert!(trace::save_chrome(path.join("no such folder"), &[]).is_err());
}

/// The spans of a thread: those that are open, and the name and fields of each that was opened, with the names around it.
#[derive(Default)]
struct Spans {
    told: Mutex<Vec<(Vec<&'static str>, String)>>,
    open: Mutex<Vec<&'static str>>,
    names: Mutex<Vec<&'static str>>,
}

impl Visit for SpanFields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.push_str(&format!("{}={value:?} ", field.name()));
    }
}

struct SpanFields(String);

impl Subscriber for Spans {
    fn enabled(&self, about: &Metadata<'_>) -> bool {
        about.is_span()
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut fields = SpanFields(format!("{} ", span.metadata().name()));
        span.record(&mut fields);
        self.told.lock().unwrap().push((self.open.lock().unwrap().clone(), fields.0));
        let mut names = self.names.lock().unwrap();
        names.push(span.metadata().name());
        Id::from_u64(names.len() as u64)
    }

    fn enter(&self, id: &Id) {
        self.open.lock().unwrap().push(self.names.lock().unwrap()[id.into_u64() as usize - 1]);
    }

    fn exit(&self, _: &Id) {
        self.open.lock().unwrap().pop().unwrap();
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
}

#[test]
fn calls_are_spans_for_those_who_subscribe() {
    on_ranks(2, "spans", |ctx| -> Result<()> {
        let spans = Arc::new(Spans::default());
        let subscriber = Dispatch::from(spans.clone());
        with_default(&subscriber, || -> Result<()> {
            ctx.group().all_reduce(&x(), ReduceOp::Sum)?;
            ctx.group().broadcast(&x(), 1)?;
            let pending = ctx.group().call(Collective::AllReduce(ReduceOp::Sum)).start(&x())?;
            let outer = tracing::info_span!("mine").entered();
            pending.wait()?;
            drop(outer);
            Ok(())
        })?;
        ctx.group().barrier()?;
        assert!(spans.open.lock().unwrap().is_empty());
        let told = spans.told.lock().unwrap();
        let has = |at: usize, around: &[&str], parts: &[&str]| {
            let (outer, text) = &told[at];
            assert!(outer == around && parts.iter().all(|part| text.contains(part)), "{told:?}");
        };
        has(
            0,
            &[],
            &["communication", "op=all_reduce", "part=Whole", "ranks=[0, 1]", "bytes=24", "watching.rs"],
        );
        has(1, &[], &["op=broadcast", " peer=1 "]);
        has(2, &[], &["part=Start"]);
        has(3, &[], &["mine"]);
        has(4, &["mine"], &["op=all_reduce", "part=Wait"]);
        assert_eq!(told.len(), 5);
        Ok(())
    });
}
