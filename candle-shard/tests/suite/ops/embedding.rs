//! Tables: rows without gradient, bags, and rows made shorter in place.
use crate::common::{Lay, mesh};
use crate::common::{on_axes, values};
use crate::ops::sweep::{Case, Input, Kind, sweep};
use candle_core::{DType, Device, Tensor};
use candle_dist::{Op, comm};
use candle_shard::kernels::{self, BagMode, Bags};
use candle_shard::{DTensor, EmbeddingBagOptions, EmbeddingOptions, Replicate, Result, Shard};
use itertools::Itertools;
use test_utils::on_ranks;

fn ids_of(ids: &Tensor) -> candle_core::Result<Vec<u32>> {
    ids.flatten_all()?.to_vec1()
}

/// Bags on one device.
fn plain_bags(
    x: &[Tensor],
    bounds: Vec<usize>,
    options: &EmbeddingBagOptions,
    weights: Option<&Tensor>,
) -> candle_core::Result<Tensor> {
    let padding = options.lookup.padding_idx.map(|padding| padding as u32);
    let ids = ids_of(&x[1])?.into_iter().map(|id| if Some(id) == padding { u32::MAX } else { id });
    let weights = weights.map(Tensor::flatten_all).transpose()?;
    kernels::embedding_bag(&x[0], &Bags::new(ids.collect_vec(), bounds)?, options.mode, weights.as_ref())
}

#[test]
fn rows_without_gradient() {
    let shapes: [[&[usize]; 2]; 4] = [[&[8, 4], &[4]], [&[5, 3], &[2, 3]], [&[2, 5], &[3]], [&[3, 2], &[]]];
    let case = |[table, ids]: [&'static [usize]; 2]| {
        let inputs: [Input; 2] = [(table, Kind::Float), (ids, Kind::Ids(table[0] as u32))];
        let options = EmbeddingOptions::default().padding_idx(-1);
        let padding = table[0] as u32 - 1;
        Case::new(
            "embedding_with",
            &inputs,
            move |x| x[0].embedding_with(&x[1], &options),
            move |x| {
                let shape = [x[1].dims(), &x[0].dims()[1..]].concat();
                kernels::embedding(&x[0], ids_of(&x[1])?, Some(padding))?.reshape(shape)
            },
        )
    };
    sweep("embedding_with", shapes.map(case).to_vec());
}

#[test]
fn bags() {
    let shapes: [[&[usize]; 2]; 4] =
        [[&[8, 4], &[4, 3]], [&[5, 3], &[3, 4]], [&[2, 5], &[2, 2]], [&[3, 1], &[1, 5]]];
    let modes = [BagMode::Sum, BagMode::Mean, BagMode::Max];
    let case = |([table, ids], mode, padded): ([&'static [usize]; 2], BagMode, bool)| {
        let inputs: [Input; 2] = [(table, Kind::Float), (ids, Kind::Ids(table[0] as u32))];
        let lookup = EmbeddingOptions::default().padding_idx(padded.then_some(1));
        let options = EmbeddingBagOptions::default().mode(mode).lookup(lookup);
        Case::new(
            &format!("embedding_bag {mode:?} padded {padded}"),
            &inputs,
            move |x| x[0].embedding_bag(&x[1], None, None, &options),
            move |x| plain_bags(x, (0..=ids[0]).map(|bag| bag * ids[1]).collect(), &options, None),
        )
    };
    sweep("embedding_bag", itertools::iproduct!(shapes, modes, [false, true]).map(case).collect());
}

#[test]
fn bags_with_weights() {
    let shapes: [[&[usize]; 2]; 3] = [[&[8, 4], &[4, 3]], [&[5, 3], &[3, 4]], [&[2, 5], &[2, 2]]];
    let case = |[table, ids]: [&'static [usize]; 2]| {
        let inputs: [Input; 3] =
            [(table, Kind::Float), (ids, Kind::Ids(table[0] as u32)), (ids, Kind::Float)];
        let lookup = EmbeddingOptions::default().padding_idx(0);
        let options = EmbeddingBagOptions::default().mode(BagMode::Sum).lookup(lookup);
        Case::new(
            "embedding_bag with weights",
            &inputs,
            move |x| x[0].embedding_bag(&x[1], None, Some(&x[2]), &options),
            move |x| plain_bags(x, (0..=ids[0]).map(|bag| bag * ids[1]).collect(), &options, Some(&x[2])),
        )
    };
    sweep("embedding_bag with weights", shapes.map(case).to_vec());
}

#[test]
fn bags_at_offsets() {
    let modes = [BagMode::Sum, BagMode::Mean, BagMode::Max];
    let offsets: [(&[u32], bool); 3] = [(&[0, 2, 2, 5], false), (&[0, 0, 3, 7], true), (&[0], false)];
    let case = |((offsets, last), mode): ((&'static [u32], bool), BagMode)| {
        let weighted = mode == BagMode::Sum;
        let ids: &[usize] = &[7];
        let mut inputs: Vec<Input> = vec![(&[5, 3], Kind::Float), (ids, Kind::Ids(5))];
        inputs.extend(weighted.then_some((ids, Kind::Float)));
        let options = EmbeddingBagOptions::default().mode(mode).include_last_offset(last);
        let bounds = offsets.iter().map(|&offset| offset as usize).chain((!last).then_some(7)).collect_vec();
        Case::new(
            &format!("embedding_bag {mode:?} at {offsets:?}"),
            &inputs,
            move |x| {
                let offsets = Tensor::from_slice(offsets, offsets.len(), &Device::Cpu)?;
                let places = vec![Shard(0); x[0].mesh().ndim()];
                let offsets = DTensor::distribute(&offsets, x[0].mesh(), &places)?;
                x[0].embedding_bag(&x[1], Some(&offsets), x.get(2), &options)
            },
            move |x| plain_bags(x, bounds.clone(), &options, x.get(2)),
        )
    };
    sweep("embedding_bag at offsets", itertools::iproduct!(offsets, modes).map(case).collect());
}

#[test]
fn rows_are_limited_in_place_as_on_one_device() {
    for shape in [&[1][..], &[2], &[3], &[4], &[2, 2], &[3, 2]] {
        on_ranks(shape.iter().product(), "embedding_renorm", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            let lays = on_axes(&[Lay::At(Replicate), Lay::At(Shard(0)), Lay::At(Shard(1))], shape.len());
            let id_lays = on_axes(&[Lay::At(Replicate), Lay::At(Shard(0))], shape.len());
            let limits = [(1.0, 2.0), (1.5, 1.0), (0.7, f64::INFINITY), (2.0, 0.5)];
            for (table, at, (max_norm, p)) in itertools::iproduct!(&lays, &id_lays, limits) {
                let place = |lays: &[Lay]| lays.iter().map(|lay| lay.placement()).collect_vec();
                let whole = values(&[7, 5], 3, DType::F64);
                let (weight, var) = DTensor::distribute(&whole, &mesh, &place(table))?.to_var()?;
                let ids = Tensor::new(&[5u32, 0, 3, 5], &Device::Cpu)?;
                let ids = DTensor::distribute(&ids, &mesh, &place(at))?;
                weight.embedding_renorm(&ids, max_norm, p)?;
                let plain = candle_shard::sparse::RowVar::new(candle_core::Var::from_tensor(&whole)?)?;
                plain.renorm(&[0, 3, 5], max_norm, p)?;
                let limited = weight.full_tensor()?;
                let off = (&limited - plain.var().as_tensor())?.abs()?.max_all()?.to_scalar::<f64>()?;
                assert!(off < 1e-15, "{} by {off}", weight.spec());
                for row in [1, 2, 4, 6] {
                    assert_eq!(limited.get(row)?.to_vec1::<f64>()?, whole.get(row)?.to_vec1::<f64>()?);
                }
                assert_eq!(var.to_vec2::<f64>()?, weight.to_local().to_vec2::<f64>()?); // the same variable
            }
            Ok(())
        });
    }
}

#[test]
fn a_table_of_any_strides_is_limited_in_its_memory() {
    on_ranks(2, "strides", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let ids = DTensor::distribute(&Tensor::new(&[0u32, 2], &Device::Cpu)?, &mesh, &[Replicate])?;
        let whole = values(&[4, 4], 3, DType::F64);
        let plain = candle_shard::sparse::RowVar::new(candle_core::Var::from_tensor(&whole)?)?;
        plain.renorm(&[0, 2], 0.5, 2.0)?;
        let local = whole.narrow(1, 2 * ctx.rank(), 2)?;
        // Only rank 0 holds a view that is not contiguous.
        let local =
            if ctx.rank() == 0 { local.t()?.force_contiguous()?.t()? } else { local.force_contiguous()? };
        let table = DTensor::from_local(local.clone(), &mesh, &[Shard(1)], (4, 4))?;
        table.embedding_renorm(&ids, 0.5, 2.0)?;
        let off = (table.full_tensor()? - plain.var().as_tensor())?.abs()?.max_all()?.to_scalar::<f64>()?;
        assert!(off < 1e-15, "by {off}");
        assert_eq!(local.to_vec2::<f64>()?, table.to_local().to_vec2::<f64>()?); // the same memory
        Ok(())
    });
}

#[test]
fn means_of_large_16_bit_numbers_are_finite() {
    on_ranks(2, "means", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let whole = Tensor::full(40_000f32, (4, 2), &Device::Cpu)?.to_dtype(DType::F16)?;
        let ids =
            DTensor::distribute(&Tensor::new(&[[0u32, 1], [3, 2]], &Device::Cpu)?, &mesh, &[Replicate])?;
        for at in [Replicate, Shard(0), Shard(1)] {
            let table = DTensor::distribute(&whole, &mesh, &[at])?;
            let means =
                table.embedding_bag(&ids, None, None, &EmbeddingBagOptions::default())?.full_tensor()?;
            assert_eq!(means.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[40_000.; 2]; 2], "{at}");
        }
        Ok(())
    });
}

#[test]
fn what_is_communicated() {
    on_ranks(4, "counts", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let ids = Tensor::new(&[[5u32, 0], [3, 5]], &Device::Cpu)?;
        let limit = EmbeddingOptions::default().max_norm(0.1);
        for (at, limited, bags) in [(Shard(0), 0, 0), (Shard(1), 1, 0)] {
            let table =
                DTensor::distribute(&values(&[8, 4], 3, DType::F32), &mesh, &[Replicate, at])?.to_var()?.0;
            let ids = DTensor::distribute(&ids, &mesh, &[Replicate, Replicate])?;
            let (made, counts) = comm::record(|| table.embedding_with(&ids, &limit));
            assert_eq!(
                (counts.total(), counts.get(Op::AllReduce).count),
                (limited, limited),
                "{}",
                made?.spec()
            );
            let (made, counts) =
                comm::record(|| table.embedding_bag(&ids, None, None, &EmbeddingBagOptions::default()));
            assert_eq!(counts.total(), bags, "{}", made?.spec());
            let options = EmbeddingBagOptions::default().mode(BagMode::Max);
            let (made, counts) = comm::record(|| table.embedding_bag(&ids, None, None, &options));
            assert_eq!(counts.get(Op::AllReduce).count, usize::from(at == Shard(0)), "{}", made?.spec());
        }
        Ok(())
    });
}

#[test]
fn wrong_arguments_are_refused_by_all_ranks() {
    for at in [Replicate, Shard(0), Shard(1)] {
        let texts = on_ranks(3, "refused", move |ctx| -> Result<String> {
            let mesh = ctx.mesh(&[("tp", 3)])?;
            let (table, var) =
                DTensor::distribute(&values(&[4, 2], 1, DType::F64), &mesh, &[at])?.to_var()?;
            let before = var.to_vec2::<f64>()?;
            let ids = |ids: &[u32]| -> Result<DTensor> {
                DTensor::distribute(&Tensor::new(ids, &Device::Cpu)?, &mesh, &[Shard(0)])
            };
            let row = |lookup| table.embedding_with(&ids(&[1, 2])?, &lookup);
            let limit =
                |max_norm, norm_type| EmbeddingOptions::default().max_norm(max_norm).norm_type(norm_type);
            let bag = |mode| EmbeddingBagOptions::default().mode(mode);
            let weights = DTensor::distribute(&values(&[2], 1, DType::F64), &mesh, &[Replicate])?;
            let made = [
                table.embedding_renorm(&ids(&[1, 4])?, 0.1, 2.0).map(|()| table.clone()),
                row(limit(0.0, 2.0)),
                row(limit(1.0, f64::NAN)),
                row(EmbeddingOptions::default().padding_idx(4)),
                table.mul(&table)?.embedding_with(&ids(&[1])?, &limit(0.1, 2.0)),
                table.embedding_bag(&ids(&[1, 2])?, None, None, &bag(BagMode::Sum)),
                table.embedding_bag(&ids(&[1, 2])?, Some(&ids(&[1])?), None, &bag(BagMode::Max)),
                table.embedding_bag(&ids(&[1, 2])?, Some(&ids(&[0])?), Some(&weights), &bag(BagMode::Mean)),
            ];
            assert_eq!(var.to_vec2::<f64>()?, before);
            Ok(made.map(|made| made.map(|made| format!("{made:?}")).unwrap_err().to_string()).join("\n"))
        });
        assert!(texts.iter().all_equal(), "{texts:?}");
        let parts = [
            "index 4",
            "max_norm 0",
            "norm_type",
            "padding_idx 4",
            "give a parameter",
            "need offsets",
            "must begin at 0",
            "mode Mean",
        ];
        assert!(texts[0].lines().zip(parts).all(|(line, part)| line.contains(part)), "{}", texts[0]);
        assert_eq!(texts[0].lines().count(), parts.len());
    }
}
