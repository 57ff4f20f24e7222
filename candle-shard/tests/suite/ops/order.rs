use crate::common::mesh;
use crate::ops::sweep::{
    Case, Input,
    Kind::{Float, Ids, Whole},
    sweep,
};
use crate::plain;
use candle_core::{DType, Device, Tensor};
use candle_shard::{DTensor, Replicate, Result, Shard};
use test_utils::on_ranks;

#[test]
fn sorting() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[1, 7]];
    for shape in shapes {
        let (x, whole): ([Input; 1], [Input; 1]) = ([(shape, Float)], [(shape, Whole)]);
        cases.extend([
            Case::new(
                "sort up",
                &x,
                |x| Ok(x[0].sort_last_dim(true)?.0),
                |x| Ok(x[0].sort_last_dim(true)?.0),
            ),
            Case::new(
                "sort down",
                &x,
                |x| Ok(x[0].sort_last_dim(false)?.0),
                |x| Ok(x[0].sort_last_dim(false)?.0),
            ),
            Case::new(
                "indices",
                &whole,
                |x| x[0].arg_sort_last_dim(false),
                |x| x[0].arg_sort_last_dim(false),
            ),
        ]);
    }
    cases.push(Case::new(
        "of none",
        &[(&[3, 0], Float)],
        |x| Ok(x[0].sort_last_dim(true)?.0),
        |x| Ok(x[0].clone()),
    ));
    sweep("sort", cases);
}

#[test]
fn the_largest() {
    let mut cases = Vec::new();
    // With few ranks the pieces are asked for candidates, with many the dim is gathered; small pieces have fewer.
    for (shape, k) in [(&[2, 17][..], 2), (&[3, 10], 3), (&[9], 1), (&[2, 5], 5), (&[2, 4], 0), (&[0, 9], 2)]
    {
        let (x, whole): ([Input; 1], [Input; 1]) = ([(shape, Float)], [(shape, Whole)]);
        cases.extend([
            Case::new(
                &format!("top {k}"),
                &x,
                move |x| Ok(x[0].topk(k)?.0),
                move |x| Ok(plain::topk(&x[0], k)?.0),
            ),
            Case::new(
                &format!("places of top {k}"),
                &whole,
                move |x| x[0].topk(k)?.1.to_dtype(DType::F64),
                move |x| plain::topk(&x[0], k)?.1.to_dtype(DType::F64),
            ),
        ]);
    }
    cases.push(Case::new(
        "ids, most of them 0",
        &[(&[2, 17], Ids(2))],
        |x| x[0].topk(2)?.1.to_dtype(DType::F64),
        |x| plain::topk(&x[0], 2)?.1.to_dtype(DType::F64),
    ));
    sweep("topk", cases);
}

#[test]
fn what_is_no_number_is_larger_than_all_numbers() {
    const NAN: f64 = f64::NAN;
    const ROWS: [[f64; 9]; 3] = [
        [1.0, NAN, 3.0, f64::INFINITY, NAN, -1.0, f64::NEG_INFINITY, 0.5, 2.0],
        [NAN; 9],
        [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, NAN],
    ];
    // As PyTorch has it; of equal ones, and of those that are no numbers, the first comes first.
    const DOWN: [[u32; 9]; 3] =
        [[1, 4, 3, 2, 8, 0, 7, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8], [8, 0, 1, 2, 3, 4, 5, 6, 7]];
    const UP: [[u32; 9]; 3] =
        [[6, 5, 7, 0, 8, 2, 3, 1, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8], [7, 6, 5, 4, 3, 2, 1, 0, 8]];
    for world in 1..=5 {
        on_ranks(world, "no numbers", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            for at in [Shard(0), Shard(1), Replicate] {
                for dtype in [DType::F64, DType::BF16] {
                    let x = Tensor::new(&ROWS, &Device::Cpu)?.to_dtype(dtype)?;
                    let x = DTensor::distribute(&x, &mesh, &[at])?;
                    for (ascending, want) in [(true, UP), (false, DOWN)] {
                        let (values, places) = x.sort_last_dim(ascending)?;
                        assert_eq!(places.to_vec2::<u32>()?, want, "{}", x.spec());
                        let values = values.to_dtype(DType::F64)?.to_vec2::<f64>()?;
                        for ((values, row), places) in values.iter().zip(ROWS).zip(want) {
                            let same = |(value, place): (&f64, &u32)| {
                                let of_row = row[*place as usize];
                                value == &of_row || value.is_nan() && of_row.is_nan()
                            };
                            assert!(values.iter().zip(&places).all(same), "{values:?}");
                        }
                    }
                    for k in [1, 2, 4] {
                        let want = DOWN.map(|row| row[..k].to_vec());
                        assert_eq!(x.topk(k)?.1.to_vec2::<u32>()?, want, "top {k} of {}", x.spec());
                    }
                }
            }
            Ok(())
        });
    }
}
