use crate::common::mesh;
use crate::ops::sweep::{
    Case, Input,
    Kind::{Float, Ids, Whole},
    sweep,
};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::comm;
use candle_shard::kernels::{LargestNumber, RowCandidates};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use test_utils::{device, on_ranks, over_nccl, skip};

/// Shapes that divide, that do not, and that leave ranks without elements.
const SHAPES: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1, 7], &[2, 1, 5]];

#[test]
fn an_extreme_of_what_is_not_a_number_does_not_depend_on_the_mesh() {
    const NAN: f64 = f64::NAN;
    if over_nccl() {
        return skip("a maximum over ranks by NCCL may lose a NaN");
    }
    on_ranks(3, "not a number", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        // Rows with one at the start, in the middle, at the end, twice, nowhere, and beside infinities.
        let rows = [
            [NAN, 2., 3., 1., 0.],
            [1., 2., NAN, 5., 4.],
            [5., 2., 3., 1., NAN],
            [1., NAN, 3., NAN, 9.],
            [1., 7., 3., 2., 0.],
            [f64::INFINITY, f64::NEG_INFINITY, 1., 0., 2.],
        ];
        let whole = Tensor::new(&rows, &Device::Cpu)?;
        let none =
            |x: &DTensor| -> Result<Vec<u8>> { Ok(x.full_tensor()?.ne(&x.full_tensor()?)?.to_vec1()?) };
        let places = |x: DTensor| -> Result<Vec<u32>> { Ok(x.full_tensor()?.to_vec1()?) };
        for at in [Replicate, Shard(0), Shard(1), Placement::PARTIAL_SUM] {
            let var = Var::from_tensor(&whole)?;
            let x = DTensor::replicated(var.as_tensor(), &mesh)?.redistribute(&[at])?;
            for x in [&x, &x.detach()] {
                assert_eq!(none(&x.max(1)?)?, [1, 1, 1, 1, 0, 0], "{at}");
                assert_eq!(none(&x.min(1)?)?, [1, 1, 1, 1, 0, 0], "{at}");
                assert_eq!(places(x.argmax(1)?)?, [0, 2, 4, 1, 1, 0], "{at}");
                assert_eq!(places(x.argmin(1)?)?, [0, 2, 4, 1, 4, 1], "{at}");
                assert!(
                    x.max_all()?.to_scalar::<f64>()?.is_nan() && x.min_all()?.to_scalar::<f64>()?.is_nan()
                );
                // What makes a number of it gets the extreme.
                let held = x.max(1)?.relu()?.full_tensor()?.to_vec1::<f64>()?;
                let of_whole =
                    DTensor::replicated(&whole, &mesh)?.max(1)?.relu()?.full_tensor()?.to_vec1::<f64>()?;
                assert_eq!(format!("{held:?}"), format!("{of_whole:?}"), "{at}");
            }
            let grads = x.max(1)?.full_tensor()?.sum_all()?.backward()?;
            let grad = grads.get(&var).unwrap();
            let of_numbers = grad.narrow(0, 4, 1)?.flatten_all()?.to_vec1::<f64>()?;
            assert_eq!(of_numbers, [0., 1., 0., 0., 0.], "{at}");
        }
        Ok(())
    });
}

#[test]
fn the_largest_of_each_row_is_the_first_on_whichever_rank_it_lies() {
    on_ranks(3, "largest of rows", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        // Equal ones on two ranks, zeros of both signs, a NaN behind an infinity, and nothing but -∞.
        let rows = [
            [1f32, 5., 2., 5., 0.],
            [-1., -0., 0., -3., -0.],
            [7., 2., inf, 3., nan],
            [7., 2., nan, 3., inf],
            [-inf; 5],
        ];
        let want = [(1, 5.), (1, 0.), (2, inf), (2, nan), (0, -inf)];
        for (at, dtype) in itertools::iproduct!([Replicate, Shard(0), Shard(1)], [DType::F32, DType::BF16]) {
            let x = Tensor::new(&rows, &Device::Cpu)?.to_dtype(dtype)?.to_device(&device())?;
            let x = DTensor::distribute(&x, &mesh, &[at])?;
            let (keys, sent) = comm::record(|| x.largest_keys());
            let found = LargestNumber::of_keys(&keys?)?;
            for (found, (place, value)) in found.iter().zip(want) {
                assert_eq!(found.place, place, "{at} {dtype:?}: {found:?}");
                let is_it = found.value == value || found.value.is_nan() && value.is_nan();
                assert!(is_it, "{at} {dtype:?}: {found:?}");
            }
            // A number of 8 bytes for each row.
            assert!(sent.total() <= 1 && sent.total_bytes() <= 8 * rows.len(), "{at}: {sent}");
        }
        assert!(
            DTensor::replicated(&Tensor::zeros(3, DType::F32, &device())?, &mesh)?.largest_keys().is_err()
        );
        // The cut changes how many are told, and not which. Rows have several parts, also on a rank.
        let numbers = |at: usize| ((at * 7919 % 613) as f32).sqrt();
        let whole = Tensor::from_vec((0..18000).map(numbers).collect::<Vec<f32>>(), (2, 9000), &Device::Cpu)?;
        let temperatures = [0.0, 2.0];
        let want = RowCandidates::of_keys(&RowCandidates::keys(&whole, &temperatures)?, &temperatures)?;
        for at in [Replicate, Shard(0), Shard(1)] {
            let x = DTensor::distribute(&whole.to_device(&device())?, &mesh, &[at])?;
            let (keys, sent) = comm::record(|| x.candidate_keys(&temperatures));
            let found = RowCandidates::of_keys(&keys?, &temperatures)?;
            for (found, want) in found.iter().zip(&want) {
                let count = want.numbers.len().min(found.numbers.len());
                assert!(count >= RowCandidates::LEAST, "{at}");
                assert_eq!(found.numbers[..count], want.numbers[..count], "{at}");
                assert!((found.sum - want.sum).abs() <= 1e-12 * want.sum, "{at}: {found:?}");
            }
            assert!(sent.total() <= 1, "{at}: {sent}");
        }
        assert!(DTensor::replicated(&whole.to_device(&device())?, &mesh)?.candidate_keys(&[1.0]).is_err());
        Ok(())
    });
}

#[test]
fn maxima_and_minima_with_equal_elements() {
    let mut cases = Vec::new();
    for shape in SHAPES {
        let x: [Input; 1] = [(shape, Whole)];
        cases.push(Case::new("max_all", &x, |x| x[0].max_all(), |x| x[0].max_all()));
        cases.push(Case::new("min_all", &x, |x| x[0].min_all(), |x| x[0].min_all()));
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(&format!("max {dim}"), &x, move |x| x[0].max(dim), move |x| x[0].max(dim)),
                Case::new(&format!("min {dim}"), &x, move |x| x[0].min(dim), move |x| x[0].min(dim)),
            ]);
        }
    }
    let x: [Input; 1] = [(&[5, 3], Float)];
    let ids: [Input; 1] = [(&[5, 3], Ids(9))];
    cases.extend([
        Case::new(
            "max beside x",
            &x,
            |x| x[0].max_keepdim(0)? * &x[0],
            |x| x[0].max_keepdim(0)?.broadcast_mul(&x[0]),
        ),
        Case::new(
            "min beside x",
            &x,
            |x| x[0].min_keepdim(1)? * &x[0],
            |x| x[0].min_keepdim(1)?.broadcast_mul(&x[0]),
        ),
        Case::new("max of none", &[(&[0, 3], Float)], |x| x[0].max(1), |x| x[0].sum(1)),
        Case::new("max of one", &[(&[], Float)], |x| x[0].max_all(), |x| x[0].max_all()),
        Case::new("max of ids", &ids, |x| x[0].max(0), |x| x[0].max(0)),
        Case::new("min of ids", &ids, |x| x[0].min(0), |x| x[0].min(0)),
    ]);
    sweep("extremes", cases);
}

#[test]
fn places_of_extremes_with_equal_elements() {
    let mut cases = Vec::new();
    for shape in SHAPES {
        let x: [Input; 1] = [(shape, Whole)];
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(&format!("argmax {dim}"), &x, move |x| x[0].argmax(dim), move |x| x[0].argmax(dim)),
                Case::new(
                    &format!("argmin {dim}"),
                    &x,
                    move |x| x[0].argmin_keepdim(dim),
                    move |x| x[0].argmin_keepdim(dim),
                ),
                Case::new(
                    &format!("argmin without {dim}"),
                    &x,
                    move |x| x[0].argmin(dim),
                    move |x| x[0].argmin(dim),
                ),
            ]);
        }
    }
    sweep("places of extremes", cases);
}

/// candle takes the stride of a repeated dim of size 1 for that of elements in a row, and divides by it.
#[test]
fn an_extreme_over_a_repeated_dim_of_one_element_is_the_element() {
    let repeated = |x: &DTensor| x.broadcast_as([&[1], x.dims()].concat());
    let plain = |x: &Tensor| x.unsqueeze(0)?.force_contiguous();
    let mut cases = Vec::new();
    let shapes: [&[usize]; 3] = [&[5], &[4], &[3]];
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        cases.extend([
            Case::new("max", &x, move |x| repeated(&x[0])?.max(0), move |x| plain(&x[0])?.max(0)),
            Case::new(
                "min",
                &x,
                move |x| repeated(&x[0])?.min_keepdim(0),
                move |x| plain(&x[0])?.min_keepdim(0),
            ),
            Case::new("argmax", &x, move |x| repeated(&x[0])?.argmax(0), move |x| plain(&x[0])?.argmax(0)),
            Case::new("argmin", &x, move |x| repeated(&x[0])?.argmin(0), move |x| plain(&x[0])?.argmin(0)),
            Case::new(
                "softmax",
                &x,
                move |x| repeated(&x[0])?.softmax(0),
                |x| x[0].zeros_like()?.exp()?.unsqueeze(0),
            ),
            Case::new(
                "log_sum_exp",
                &x,
                move |x| repeated(&x[0])?.log_sum_exp(0),
                move |x| plain(&x[0])?.log_sum_exp(0),
            ),
        ]);
    }
    sweep("repeated dims", cases);
}

#[test]
fn extremes_that_are_infinite() {
    let cases = vec![
        Case::new(
            "argmax",
            &[(&[5, 3], Whole)],
            |x| x[0].sqr()?.recip()?.argmax(0),
            |x| x[0].sqr()?.recip()?.argmax(0),
        ),
        Case::new(
            "max of minus infinities",
            &[(&[5, 3], Float)],
            |x| x[0].detach().sqr()?.affine(f64::NEG_INFINITY, 0.0)?.max(0)?.exp(),
            |x| x[0].detach().sqr()?.affine(f64::NEG_INFINITY, 0.0)?.max(0)?.exp(),
        ),
        Case::new(
            "argmax of minus infinities",
            &[(&[5, 3], Float)],
            |x| x[0].sqr()?.affine(f64::NEG_INFINITY, 0.0)?.argmax(0),
            |x| x[0].sqr()?.affine(f64::NEG_INFINITY, 0.0)?.argmax(0),
        ),
    ];
    sweep("infinite extremes", cases);
}
