//! Changes in place, against one device: all layouts of both tensors, and what is refused.
use crate::common::*;
use candle_core::scalar::Scalar;
use candle_core::{DType, Device, Tensor};
use candle_dist::comm;
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use test_utils::on_ranks;

const AXES: [&[usize]; 6] = [&[1], &[2], &[3], &[4], &[2, 2], &[3, 2]];

fn layouts(rank: usize, axes: usize) -> Vec<Vec<Placement>> {
    on_axes(&(0..rank).map(Shard).chain([Replicate]).collect::<Vec<_>>(), axes)
}

#[test]
fn parts_are_written_where_they_lie() {
    for axes in AXES {
        on_ranks(axes.iter().product(), "slice_set", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, axes)?;
            let base = values(&[5, 6], 1, DType::F64);
            for (dim, offset, len) in [(0, 1, 3), (0, 0, 5), (1, 4, 2), (1, 2, 1), (0, 5, 0)] {
                let shape = if dim == 0 { [len, 6] } else { [5, len] };
                let src = values(&shape, 2, DType::F64);
                let want = base.copy()?;
                if len > 0 {
                    want.slice_set(&src, dim, offset)?;
                }
                for to in layouts(2, axes.len()) {
                    for from in layouts(2, axes.len()) {
                        let x = DTensor::distribute(&base, &mesh, &to)?;
                        let clone = x.clone();
                        let src = DTensor::distribute(&src, &mesh, &from)?;
                        let (set, counts) = comm::record(|| x.slice_set(&src, dim, offset));
                        set?;
                        assert_eq!(
                            value_error(&clone, &want)?,
                            0.0,
                            "{} at {offset} of {dim} of {}",
                            src.spec(),
                            x.spec()
                        );
                        assert!(!src.is_replicated() || counts.total() == 0, "{}: {counts}", x.spec());
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn elements_and_constants_are_written_where_they_lie() {
    for axes in AXES {
        on_ranks(axes.iter().product(), "scatter_set", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, axes)?;
            let (base, src) = (values(&[5, 6], 1, DType::F64), values(&[2, 6], 2, DType::F64));
            let ids =
                Tensor::from_iter((0..12u32).map(|i| (i * 7 + i / 6) % 5), &Device::Cpu)?.reshape((2, 6))?;
            for to in layouts(2, axes.len()) {
                let x = || DTensor::distribute(&base, &mesh, &to);
                let spread = |x: &Tensor| DTensor::distribute(x, &mesh, &vec![Replicate; axes.len()]);
                let same = |x: &DTensor, want: &Tensor| -> Result<()> {
                    assert_eq!(value_error(x, want)?, 0.0, "{}", x.spec());
                    assert_eq!(x.placements(), to);
                    Ok(())
                };
                let (set, added) = (x()?, x()?);
                set.scatter_set(&spread(&ids)?, &spread(&src)?, 0)?;
                added.scatter_add_set(&spread(&ids)?, &spread(&src)?, 0)?;
                same(&set, &base.scatter(&ids, &src, 0)?)?;
                same(&added, &base.scatter_add(&ids, &src, 0)?)?;
                let zeros = base.zeros_like()?;
                set.zero_set()?;
                same(&set, &zeros)?;
                set.one_set()?;
                same(&set, &base.ones_like()?)?;
                set.const_set(Scalar::from(2.5))?;
                same(&set, &(zeros + 2.5)?)?;
            }
            Ok(())
        });
    }
}

#[test]
fn memory_that_others_share_is_not_written() {
    on_ranks(3, "refused", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let x = DTensor::distribute(&values(&[5, 6], 1, DType::F64), &mesh, &[Shard(0)])?;
        let refused = |x: &DTensor, why: &str| {
            let error = x.zero_set().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(&x.narrow(1, 0, 2)?, "result of an op");
        refused(&x.sum(0)?, "partial");
        refused(&DTensor::replicated(x.to_var()?.1.sqr()?.as_ref(), &mesh)?, "has a gradient");
        assert!(x.const_set(Scalar::from(1f32)).is_err());
        assert!(x.slice_set(&x, 0, 1).unwrap_err().to_string().contains("expected a part inside"));
        // A copy is nobody else's, and a parameter may change, as an optimizer changes it.
        let before = x.full_tensor()?;
        x.copy()?.zero_set()?;
        x.t()?.force_contiguous()?.zero_set()?;
        assert_eq!(value_error(&x, &before)?, 0.0);
        assert!(x.copy()?.is_contiguous() && (ctx.rank() == 2 || !x.t()?.is_contiguous())); // rank 2 has one row
        let (parameter, var) = x.to_var()?;
        parameter.zero_set()?;
        assert_eq!(var.as_tensor().sum_all()?.to_scalar::<f64>()?, 0.0);
        assert_eq!((x.normalize_axis(-1)?, x.normalize_axis(0)?, x.dims2()?), (1, 0, (5, 6)));
        assert!(x.normalize_axis(2).is_err() && x.normalize_axis(-3).is_err() && x.dims3().is_err());
        Ok(())
    });
}
