//! Clipping by the total norm of parameters that are sharded over several groups.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{ClipGradNorm, Error, Op, ProcessGroup, Result, comm};
use test_utils::on_ranks;

fn ones(dtype: DType, len: usize) -> Var {
    Var::ones(len, dtype, &Device::Cpu).unwrap()
}

fn assert_close(got: &Tensor, want: &Tensor, within: f64, what: &str) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let difference = (got - want).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    let difference = difference.to_scalar::<f64>().unwrap();
    assert!(difference < within, "{what} differs by {difference}");
}

/// Four parameters on a 2 by 2 grid: whole, cut over columns, cut over rows, and cut over both. Values are this rank's.
fn grid_gradients(row: usize, column: usize) -> ([(&'static str, Var); 4], GradStore) {
    let vars = ["whole", "columns", "rows", "both"].map(|name| (name, ones(DType::F64, 1)));
    let values = [3.0, -(10.0 + column as f64), 20.0 + row as f64, 30.0 + (row * 2 + column) as f64];
    let mut grads = GradStore::default();
    for ((_, var), value) in vars.iter().zip(values) {
        grads.insert(var, Tensor::new(&[value], &Device::Cpu).unwrap());
    }
    (vars, grads)
}

fn grid_clip(columns: &ProcessGroup, rows: &ProcessGroup) -> ClipGradNorm {
    ClipGradNorm::new(1.0)
        .sharded(columns, ["columns"])
        .sharded(rows, ["rows", "both"])
        .sharded(columns, ["both"])
}

#[test]
fn the_norm_counts_every_piece_once_in_one_collective_a_group() {
    let pieces: [f64; 9] = [3.0, -10.0, -11.0, 20.0, 21.0, 30.0, 31.0, 32.0, 33.0];
    for p in [1.0, 2.0, 3.5, f64::INFINITY] {
        let want = match p == f64::INFINITY {
            true => 33.0,
            false => pieces.iter().map(|v| v.abs().powf(p)).sum::<f64>().powf(1.0 / p),
        };
        on_ranks(4, &format!("norm {p}"), move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("row", 2), ("column", 2)])?;
            let (vars, mut grads) = grid_gradients(mesh.coordinate()[0], mesh.coordinate()[1]);
            let before: Vec<Tensor> = vars.iter().map(|(_, var)| grads.get(var).unwrap().clone()).collect();
            let clip = grid_clip(mesh.axis_group("column")?, mesh.axis_group("row")?).norm_type(p);
            let (norm, counts) = comm::record(|| clip.clip(&vars, &mut grads));
            let norm = norm?;
            assert!((norm - want).abs() < 1e-10 * want, "{norm} is not {want}");
            assert_eq!((counts.get(Op::AllReduce).count, counts.total()), (2, 2));
            for ((name, var), before) in vars.iter().zip(before) {
                assert_close(grads.get(var).unwrap(), &(before * (1.0 / (want + 1e-6)))?, 1e-12, name);
            }
            Ok(())
        });
    }
}

/// Pipeline stages that share one parameter. Only the first stage is cut by columns.
#[test]
fn ranks_of_a_group_may_have_named_others_before_it_and_hold_copies() {
    on_ranks(4, "stages", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("stage", 2), ("column", 2)])?;
        let (stage, column) = (mesh.coordinate()[0], mesh.coordinate()[1]);
        let (own, shared) = (ones(DType::F64, 1), ones(DType::F64, 1));
        let mut grads = GradStore::default();
        grads.insert(&own, Tensor::new(&[[3.0 + column as f64, 5.0][stage]], &Device::Cpu)?);
        grads.insert(&shared, Tensor::new(&[7.0], &Device::Cpu)?);
        let (columns, stages) = (mesh.axis_group("column")?, mesh.axis_group("stage")?);
        let clip = ClipGradNorm::new(1.0);
        let clip = match stage {
            0 => clip.sharded(columns, ["own"]).sharded(stages, ["own", "shared"]),
            _ => clip.staged(stages).elsewhere([shared.clone()]),
        };
        let norm = clip.clip(&[("own", own), ("shared", shared.clone())], &mut grads)?;
        let want = (3.0f64.powi(2) + 4.0f64.powi(2) + 5.0f64.powi(2) + 7.0f64.powi(2)).sqrt();
        assert!((norm - want).abs() < 1e-12, "{norm} is not {want}");
        let scaled = grads.get(&shared).unwrap().to_vec1::<f64>()?[0];
        assert!((scaled - 7.0 / (want + 1e-6)).abs() < 1e-12, "{scaled}");
        Ok(())
    });
}

#[test]
fn a_norm_that_is_not_finite_is_returned_or_an_error() {
    for (bad, p) in
        [(f64::NAN, 2.0), (f64::NAN, f64::INFINITY), (f64::INFINITY, 2.0), (f64::NEG_INFINITY, 1.0)]
    {
        on_ranks(4, &format!("{bad} in norm {p}"), move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("row", 2), ("column", 2)])?;
            let (vars, mut grads) = grid_gradients(mesh.coordinate()[0], mesh.coordinate()[1]);
            if ctx.rank() == 1 {
                grads.insert(&vars[3].1, Tensor::new(&[bad], &Device::Cpu)?);
            }
            let clip = grid_clip(mesh.axis_group("column")?, mesh.axis_group("row")?).norm_type(p);
            let norm = clip.clip(&vars, &mut grads)?;
            assert!(norm.is_nan() == bad.is_nan() && !norm.is_finite(), "{norm}");
            assert_eq!(grads.get(&vars[0].1).unwrap().to_vec1::<f64>()?, [3.0]);
            let error = clip.error_if_nonfinite(true).clip(&vars, &mut grads).unwrap_err();
            assert!(matches!(error, Error::Invalid { op: "clip_grad_norm", .. }), "{error}");
            Ok(())
        });
    }
}

#[test]
fn clipping_refuses_what_makes_no_sense() {
    on_ranks(2, "clip errors", |ctx| -> Result<()> {
        let (vars, mut grads) = ([("w", ones(DType::F32, 2))], GradStore::default());
        let mut refuse = |clip: ClipGradNorm, part: &str| {
            let text = clip.clip(&vars, &mut grads).unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        };
        refuse(ClipGradNorm::new(-1.0), "max_norm -1");
        refuse(ClipGradNorm::new(f64::NAN), "max_norm NaN");
        refuse(ClipGradNorm::new(1.0).norm_type(0.0), "norm_type 0");
        refuse(ClipGradNorm::new(1.0).sharded(ctx.group(), ["v"]), "\"v\" is said to be sharded");
        Ok(())
    });
}
