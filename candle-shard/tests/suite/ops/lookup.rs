use crate::ops::sweep::{Case, Input, Kind, sweep};
use crate::plain;
use candle_core::{DType, Tensor};
use candle_shard::DTensor;
use test_utils::on_ranks;

#[test]
fn embedding() {
    let shapes: [[&[usize]; 2]; 6] = [
        [&[8, 4], &[4]],
        [&[5, 3], &[2, 3]],
        [&[7, 1], &[5, 1]],
        [&[1, 2], &[3]],
        [&[2, 5], &[1, 2]],
        [&[3, 2], &[]],
    ];
    let case = |[table, ids]: [&'static [usize]; 2]| {
        let inputs: [Input; 2] = [(table, Kind::Float), (ids, Kind::Ids(table[0] as u32))];
        Case::new("embedding", &inputs, |x| x[0].embedding(&x[1]), plain::embedding)
    };
    sweep("embedding", shapes.map(case).to_vec());
}

#[test]
fn cross_entropy() {
    let shapes: [[&[usize]; 2]; 5] =
        [[&[4, 6], &[4]], [&[5, 3], &[5]], [&[1, 7], &[1]], [&[2, 3, 5], &[2, 3]], [&[3], &[]]];
    let case = |[logits, targets]: [&'static [usize]; 2]| {
        let classes = *logits.last().unwrap();
        let inputs: [Input; 2] = [(logits, Kind::Float), (targets, Kind::Ids(classes as u32))];
        Case::new(
            "cross_entropy",
            &inputs,
            |x| x[0].cross_entropy(&x[1]),
            move |x| {
                let (logits, targets) = (x[0].reshape(((), classes))?, x[1].flatten_all()?.unsqueeze(1)?);
                (logits.exp()?.sum_keepdim(1)?.log()? - logits.gather(&targets, 1)?)?.mean_all()
            },
        )
    };
    sweep("cross_entropy", shapes.map(case).to_vec());
}

#[test]
fn ids_that_are_no_rows_are_refused() {
    use candle_shard::{Replicate, Shard};
    for at in [Replicate, Shard(0), Shard(1)] {
        let texts = on_ranks(3, "bad ids", move |ctx| -> candle_shard::Result<String> {
            let mesh = ctx.mesh(&[("a", 3)])?;
            // Some ranks hold nothing of the table, or of its two columns.
            let table = DTensor::distribute(&crate::common::values(&[4, 2], 1, DType::F64), &mesh, &[at])?;
            let ids = Tensor::new(&[1u32, 4], &candle_core::Device::Cpu)?;
            let ids = DTensor::distribute(&ids, &mesh, &[Replicate])?;
            let (source, places) = (table.narrow(0, 0, 2)?, ids.unsqueeze(1)?.broadcast_as((2, 2))?);
            let made = [
                table.embedding(&ids),
                table.gather(&places, 0),
                table.scatter(&places, &source, 0),
                table.scatter_add(&places, &source, 0),
                table.index_add(&ids, &source, 0),
            ];
            Ok(made.map(|made| made.unwrap_err().to_string()).join("\n"))
        });
        let ops = ["embedding", "gather", "scatter", "scatter_add", "index_add"];
        let want = ops.map(|op| format!("{op}: index 4 is outside of dim 0 of size 4")).join("\n");
        assert!(texts.iter().all(|text| *text == want), "{texts:?}");
    }
}

#[test]
fn index_select() {
    let mut cases = Vec::new();
    let shapes: [([&[usize]; 2], usize); 6] = [
        ([&[8, 4], &[5]], 0),
        ([&[5, 3], &[4]], 1),
        ([&[2, 7, 3], &[2]], 1),
        ([&[1, 2], &[3]], 0),
        ([&[5, 3], &[0]], 0),
        ([&[6], &[4]], 0),
    ];
    for ([x, ids], dim) in shapes {
        let inputs: [Input; 2] = [(x, Kind::Float), (ids, Kind::Ids(x[dim] as u32))];
        let name = format!("index_select {dim}");
        cases.push(Case::new(
            &name,
            &inputs,
            move |x| x[0].index_select(&x[1], dim),
            move |x| x[0].index_select(&x[1], dim),
        ));
    }
    let inputs: [Input; 2] = [(&[5, 3], Kind::Float), (&[4], Kind::Ids(5))];
    let of = |dtype| {
        Case::new(
            &format!("{} indexes of a transposed", candle_core::DType::as_str(&dtype)),
            &inputs,
            move |x| x[0].t()?.index_select(&x[1].to_dtype(dtype)?, 1)?.sqr(),
            |x| x[0].t()?.contiguous()?.index_select(&x[1], 1)?.sqr(),
        )
    };
    cases.extend([of(DType::U8), of(DType::I64)]);
    sweep("index_select", cases);
}

#[test]
fn gather() {
    let shapes: [([&[usize]; 2], usize); 6] = [
        ([&[4, 6], &[3, 6]], 0),
        ([&[5, 3], &[5, 4]], 1),
        ([&[5, 3], &[5, 1]], 1),
        ([&[1, 7], &[1, 2]], 1),
        ([&[2, 3, 5], &[2, 2, 5]], 1),
        ([&[5, 3], &[0, 3]], 0),
    ];
    let case = |([x, ids], dim): ([&'static [usize]; 2], usize)| {
        let inputs: [Input; 2] = [(x, Kind::Float), (ids, Kind::Ids(x[dim] as u32))];
        let name = format!("gather {dim}");
        Case::new(&name, &inputs, move |x| x[0].gather(&x[1], dim), move |x| x[0].gather(&x[1], dim))
    };
    let mut cases = shapes.map(case).to_vec();
    // candle has no gradient for indexes that are smaller than the tensor in another dim.
    cases.push(Case::new(
        "gather beside a larger dim",
        &[(&[5, 3], Kind::Float), (&[2, 4], Kind::Ids(3))],
        |x| x[0].gather(&x[1], 1),
        |x| x[0].narrow(0, 0, 2)?.gather(&x[1], 1),
    ));
    sweep("gather", cases);
}

#[test]
fn scatters() {
    let shapes: [([&[usize]; 2], usize); 5] = [
        ([&[4, 6], &[3, 6]], 0),
        ([&[5, 3], &[5, 4]], 1),
        ([&[5, 3], &[1, 3]], 0),
        ([&[1, 7], &[1, 2]], 1),
        ([&[5], &[7]], 0),
    ];
    let mut cases = Vec::new();
    for ([x, part], dim) in shapes {
        let inputs: [Input; 3] = [(x, Kind::Float), (part, Kind::Ids(x[dim] as u32)), (part, Kind::Float)];
        cases.extend([
            Case::new(
                &format!("scatter_add {dim}"),
                &inputs,
                move |x| x[0].scatter_add(&x[1], &x[2], dim),
                move |x| plain::scatter_add(x, dim),
            ),
            Case::new(
                &format!("scatter {dim}"),
                &inputs,
                move |x| x[0].scatter(&x[1], &x[2], dim),
                move |x| {
                    let kept = x[0].ones_like()?.scatter(&x[1], &x[2].zeros_like()?, dim)?;
                    (&x[0] * kept)? + x[0].zeros_like()?.scatter(&x[1], &x[2], dim)?
                },
            ),
        ]);
    }
    sweep("scatter", cases);
}

#[test]
fn index_add() {
    let shapes: [([&[usize]; 3], usize); 4] = [
        ([&[4, 6], &[3], &[3, 6]], 0),
        ([&[5, 3], &[4], &[5, 4]], 1),
        ([&[5, 3], &[0], &[0, 3]], 0),
        ([&[2, 1, 3], &[7], &[2, 7, 3]], 1),
    ];
    let case = |([x, ids, part], dim): ([&'static [usize]; 3], usize)| {
        let inputs: [Input; 3] = [(x, Kind::Float), (ids, Kind::Ids(x[dim] as u32)), (part, Kind::Float)];
        let name = format!("index_add {dim}");
        Case::new(
            &name,
            &inputs,
            move |x| x[0].index_add(&x[1], &x[2], dim),
            move |x| x[0].index_add(&x[1], &x[2], dim),
        )
    };
    sweep("index_add", shapes.map(case).to_vec());
}
