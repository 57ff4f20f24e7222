use crate::sweep::{Case, Input, Kind, sweep};
use candle_core::{DType, Tensor};
use candle_shard::DTensor;
use test_utils::on_ranks;

fn plain_embedding(x: &[Tensor]) -> candle_core::Result<Tensor> {
    let shape = [x[1].dims(), &x[0].dims()[1..]].concat();
    x[0].index_select(&x[1].flatten_all()?, 0)?.reshape(shape)
}

#[test]
fn embedding() {
    let shapes: [[&[usize]; 2]; 6] =
        [[&[8, 4], &[4]], [&[5, 3], &[2, 3]], [&[7, 1], &[5, 1]], [&[1, 2], &[3]], [&[2, 5], &[1, 2]], [&[3, 2], &[]]];
    let case = |[table, ids]: [&'static [usize]; 2]| {
        let inputs: [Input; 2] = [(table, Kind::Float), (ids, Kind::Ids(table[0] as u32))];
        Case::new("embedding", &inputs, |x| x[0].embedding(&x[1]), plain_embedding)
    };
    sweep("embedding", DType::F64, shapes.map(case).to_vec());
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
    sweep("cross_entropy", DType::F64, shapes.map(case).to_vec());
}

#[test]
fn ids_that_are_no_rows_are_refused() {
    use candle_shard::{Replicate, Shard};
    for at in [Replicate, Shard(0), Shard(1)] {
        let texts = on_ranks(3, "bad ids", move |ctx| -> candle_shard::Result<String> {
            let mesh = ctx.mesh(&[("a", 3)])?;
            let table = DTensor::distribute(&crate::common::values(&[4, 5], 1, DType::F64), &mesh, &[at])?;
            let ids = Tensor::new(&[1u32, 4], &candle_core::Device::Cpu)?;
            let ids = DTensor::distribute(&ids, &mesh, &[Replicate])?;
            Ok(table.embedding(&ids).unwrap_err().to_string())
        });
        assert!(texts.iter().all(|t| t == "embedding: index 4 is outside of dim 0 of size 4"), "{texts:?}");
    }
}
