//! Communication that nobody asked for: refused in `strict`, told once otherwise, and never for what was asked.
use crate::common::*;
use candle_core::{DType, Tensor};
use candle_dist::{Op, comm};
use candle_shard::{DTensor, Replicate, Result, Shard, Spec, strict};
use std::cell::RefCell;
use std::sync::Arc;
use test_utils::on_ranks;

type Unasked = (&'static str, fn(&DTensor) -> Result<DTensor>, &'static str);

/// Calls that gather in the middle of a computation, with what they say.
const UNASKED: [Unasked; 7] = [
    ("reshape", |x| x.reshape((32, 16)), "f64[4, 8@a, 16]"),
    ("layer_norm", |x| x.transpose(1, 2)?.layer_norm(&norm(x)?, &norm(x)?, 1e-5), "f64[4, 16, 8@a]"),
    ("rms_norm", |x| x.transpose(1, 2)?.rms_norm(&norm(x)?, 1e-5), "f64[4, 16, 8@a]"),
    ("causal_softmax", |x| x.transpose(1, 2)?.causal_softmax(1.0), "f64[4, 16, 8@a]"),
    ("cat", |x| DTensor::cat(&[&vector(x)?, &vector(x)?], 0), "f64[8@a]"),
    ("sort_last_dim", |x| Ok(vector(x)?.sort_last_dim(true)?.0), "f64[8@a]"),
    (
        "whole",
        |x| DTensor::on_whole("whole", &[x], (&[4, 8, 16], DType::F64), |x| Ok(x[0].clone())),
        "f64[4, 8@a, 16]",
    ),
];

fn norm(x: &DTensor) -> Result<DTensor> {
    DTensor::ones(8, DType::F64, x.device(), x.mesh(), &[Replicate])
}

fn vector(x: &DTensor) -> Result<DTensor> {
    x.get(0)?.sum(1)
}

thread_local! {
    static TOLD: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Keeps what this thread logs.
struct Memory;

impl log::Log for Memory {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        TOLD.with_borrow_mut(|told| told.push(record.args().to_string()));
    }

    fn flush(&self) {}
}

#[test]
fn a_gather_that_nobody_asked_for_is_refused_or_told() {
    log::set_logger(&Memory).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let texts = on_ranks(2, "unasked", |ctx| -> Result<Vec<String>> {
        let mesh = mesh(ctx, &[2])?;
        let x = DTensor::distribute(&values(&[4, 8, 16], 1, DType::F64), &mesh, &[Shard(1)])?;
        let mut texts = Vec::new();
        for (op, call, input) in UNASKED {
            let (refused, counts) = comm::record(|| strict(|| call(&x)));
            assert_eq!(counts.total(), 0, "{op}: {counts}");
            let text = refused.unwrap_err().to_string();
            assert!(text.starts_with(&format!("{op}: {input} would move by all_")), "{text}");
            assert!(
                text.contains(" over a, ") && text.contains(" bytes received by a rank at most"),
                "{text}"
            );
            assert!(text.contains("ops/strict.rs:"), "{text}");
            texts.push(text);
            // Outside of it every such call is made, and told once.
            TOLD.take();
            let made = (call(&x)?.full_tensor()?, call(&x)?.full_tensor()?);
            assert_eq!(distance(&made.0, &made.1), 0.0);
            let told = TOLD.take();
            assert_eq!(told.len(), usize::from(ctx.rank() == 0), "{op}: {told:?}");
            assert!(
                told.iter().all(|told| told.starts_with(op) && told.contains("ops/strict.rs:")),
                "{told:?}"
            );
        }
        Ok(texts)
    });
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn what_was_asked_for_is_not_refused() {
    on_ranks(2, "asked", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let leaf = Leaf::new(&values(&[4, 6], 1, DType::F64), &mesh, &[Lay::At(Shard(1))])?;
        let targets = DTensor::distribute(
            &Tensor::new(&[0u32, 5, 2, 1], mesh.group()?.device())?,
            &mesh,
            &[Replicate],
        )?;
        strict(|| {
            let whole = leaf.tensor.redistribute(&[Replicate])?;
            let rows = leaf.tensor.softmax(1)?.add(&leaf.tensor)?; // exchanges numbers of rows
            let loss = rows.cross_entropy(&targets)?.add(&whole.sqr()?.mean_all()?)?;
            loss.to_scalar::<f64>()?;
            loss.backward().map(drop)
        })
    });
}

#[test]
fn pieces_of_heads_that_meet_a_weight_in_other_pieces_send_only_what_changes_hands() {
    on_ranks(4, "heads", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[4])?;
        let (x, w) = (values(&[3, 24], 1, DType::F64), values(&[5, 24], 2, DType::F64));
        let spec = Spec::new(&mesh, &[Shard(1)], (3, 24), DType::F64)?
            .with_sizes(0, Some(Arc::from([8, 8, 8, 0])))?;
        let heads = Leaf::with_spec(&x, spec, &[Lay::At(Shard(1))])?;
        let weight = Leaf::new(&w, &mesh, &[Lay::At(Shard(1))])?;
        let (out, counts) = comm::record(|| heads.tensor.linear(&weight.tensor, None));
        let out = out?;
        // The input is the smaller one: 2, 4 and 6 of the 24 columns of 3 rows go on, and no rank gets the whole.
        assert_eq!((counts.total(), counts.get(Op::AllToAll).count), (1, 1), "{counts}");
        assert_eq!(counts.total_bytes(), [2, 4, 6, 0][ctx.rank()] * 3 * 8, "{counts}");
        assert!(value_error(&out, &x.matmul(&w.t()?)?)? < 1e-12);
        let grads = out.sqr()?.sum_all()?.backward()?;
        let y = (x.matmul(&w.t()?)? * 2.0)?;
        assert!(heads.gradient_error(&grads, &y.matmul(&w)?)? < 1e-11);
        assert!(weight.gradient_error(&grads, &y.t()?.matmul(&x)?)? < 1e-11);
        Ok(())
    });
}
