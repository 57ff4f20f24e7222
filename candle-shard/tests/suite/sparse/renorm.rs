//! `max_norm` against a plain loop.

use candle_core::{DType, Device::Cpu, Tensor, Var};
use candle_shard::Result;
use candle_shard::sparse::RowVar;

use crate::sparse::*;

const NORM_TYPES: [f64; 8] = [0.0, 0.5, 1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY, -1.0];

fn norm(row: &[f64], p: f64) -> f64 {
    let sizes = row.iter().map(|x| x.abs());
    match p {
        f64::INFINITY => sizes.fold(0.0, f64::max),
        f64::NEG_INFINITY => sizes.fold(f64::INFINITY, f64::min),
        0.0 => sizes.filter(|&x| x != 0.0).count() as f64,
        p => sizes.map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p),
    }
}

#[test]
fn long_rows_are_shortened_and_no_others() -> Result<()> {
    let mut random = Random::new(12);
    for (dtype, tolerance) in
        [(DType::F64, 1e-12), (DType::F32, 1e-6), (DType::F16, 2e-3), (DType::BF16, 2e-2)]
    {
        for width in [1, 3, 16, 50] {
            for p in NORM_TYPES {
                let table = random.table(90, width, dtype);
                let start = table.var().copy()?;
                let rows: Vec<Vec<f64>> = numbers(&start).chunks(width).map(<[f64]>::to_vec).collect();
                // Above half of the norms and below the others, and far from all of them.
                let mut norms: Vec<f64> = rows.iter().map(|row| norm(row, p)).collect();
                norms.sort_by(f64::total_cmp);
                let widest =
                    (30..60).max_by(|&a, &b| (norms[a + 1] - norms[a]).total_cmp(&(norms[b + 1] - norms[b])));
                let at = widest.unwrap();
                let max_norm = (norms[at] + norms[at + 1]) / 2.0;
                let ids = random.rows(80, 70);
                table.renorm(&ids, max_norm, p)?;
                for (row, old) in rows.iter().enumerate() {
                    let (what, now) =
                        (format!("{dtype:?} [90, {width}], p {p}, row {row}"), table.var().get(row)?);
                    if ids.contains(&(row as u32)) && norm(old, p) > max_norm {
                        let scale = max_norm / (norm(old, p) + 1e-7);
                        let want: Vec<f64> = old.iter().map(|x| x * scale).collect();
                        assert_close(&now, &Tensor::new(want, &Cpu)?, tolerance, &what);
                    } else {
                        assert_eq!(bits(&now), bits(&start.get(row)?), "{what}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_norm_at_the_bound_stays() -> Result<()> {
    for dtype in DTYPES {
        let start = Tensor::new(&[[3f64, -4.], [0., 0.], [0., 5.], [3., 4.25]], &Cpu)?.to_dtype(dtype)?;
        let table = RowVar::new(Var::from_tensor(&start)?)?;
        table.renorm(&[0, 1, 2, 3, 3], 5.0, 2.0)?;
        let (now, start) = (table.var(), start.narrow(0, 0, 3)?);
        assert_eq!(bits(&now.narrow(0, 0, 3)?), bits(&start), "{dtype:?}");
        // Listed twice, shortened once.
        let scale = 5.0 / (numbers(&Tensor::new(27.0625f64.sqrt(), &Cpu)?.to_dtype(dtype)?)[0] + 1e-7);
        assert_close(
            &now.get(3)?,
            &Tensor::new(&[3.0 * scale, 4.25 * scale], &Cpu)?,
            tolerance(dtype),
            "row 3",
        );
    }
    Ok(())
}

/// What PyTorch makes of them, for each norm type with the bound 2: `_` for unchanged, else the row.
#[test]
fn infinite_and_missing_numbers_go_where_pytorch_sends_them() -> Result<()> {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let start = [[nan, 1., 2.], [inf, 1., 2.], [0., 0., 0.]];
    let third = 0.666_666_6;
    for p in NORM_TYPES {
        let table = RowVar::new(Var::new(&start, &Cpu)?)?;
        table.renorm(&[0, 1, 2], 2.0, p)?;
        let want = match p {
            // All three elements count.
            0.0 => [[nan, third, 2.0 * third], [inf, third, 2.0 * third], start[2]],
            p if p < 0.0 => start,
            // A norm of NaN compares as nothing; an infinite one leaves zeros, and no number of infinity.
            _ => [start[0], [nan, 0., 0.], start[2]],
        };
        let same = |a: f32, b: f32| a == b || a.is_nan() && b.is_nan();
        let got = table.var().to_vec2::<f32>()?;
        assert!(got.iter().flatten().zip(want.iter().flatten()).all(|(&a, &b)| same(a, b)), "p {p}: {got:?}");
    }
    Ok(())
}

#[test]
fn nothing_to_shorten_is_no_error() -> Result<()> {
    for (dims, rows) in [([0, 3], vec![]), ([4, 0], vec![1, 3]), ([4, 3], vec![])] {
        for p in NORM_TYPES {
            let table = RowVar::new(Var::ones(&dims[..], DType::F32, &Cpu)?)?;
            table.renorm(&rows, 0.5, p)?;
            assert!(numbers(table.var()).iter().all(|&x| x == 1.0));
        }
    }
    Ok(())
}
