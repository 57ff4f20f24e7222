use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use crate::plain;
use candle_core::{D, DType, Tensor};
use candle_dist::comm;
use candle_shard::kernels::{self, RopePairs};
use candle_shard::{AttentionMask, DTensor, Replicate, Result, Shard};
use test_utils::on_ranks;

#[test]
fn silu_gate() {
    let shapes: [&[usize]; 5] = [&[4, 6], &[5, 3], &[1, 7], &[2, 1, 3], &[0, 3]];
    let case = |shape| {
        let plain = |x: &[Tensor]| x[0].silu()? * &x[1];
        Case::new("silu_gate", &[(shape, Float), (shape, Float)], |x| x[0].silu_gate(&x[1]), plain)
    };
    sweep("silu_gate", shapes.map(case).to_vec());
}

#[test]
fn rotary_positions() {
    let shapes: [[&[usize]; 2]; 4] =
        [[&[4, 6], &[7, 3]], [&[2, 3, 5, 2], &[8, 1]], [&[1, 2, 1, 4], &[4, 2]], [&[3, 2, 4], &[7, 2]]];
    let mut cases = Vec::new();
    for [x, tables] in shapes {
        for pairs in [RopePairs::Halves, RopePairs::Neighbors] {
            let inputs: [Input; 3] = [(x, Float), (tables, Float), (tables, Float)];
            cases.push(Case::new(
                &format!("rope {pairs:?}"),
                &inputs,
                move |x| x[0].rope(&x[1].detach(), &x[2].detach(), 3, pairs),
                move |x| kernels::rope(&x[0], &x[1].detach(), &x[2].detach(), 3, pairs),
            ));
        }
    }
    // Angles of each element of the batch.
    let shapes: [[&[usize]; 2]; 3] =
        [[&[2, 3, 5, 2], &[2, 8, 1]], [&[3, 1, 2, 4], &[3, 6, 2]], [&[1, 2, 4, 6], &[1, 7, 3]]];
    for [x, tables] in shapes {
        let inputs: [Input; 3] = [(x, Float), (tables, Float), (tables, Float)];
        let elements = |x: &[Tensor]| -> Result<Tensor, candle_core::Error> {
            let one = |i: usize| {
                let [x, cos, sin] = [0, 1, 2].map(|of| x[of].get(i));
                kernels::rope(&x?.unsqueeze(0)?, &cos?.detach(), &sin?.detach(), 2, RopePairs::Halves)
            };
            Tensor::cat(&(0..x[0].dim(0)?).map(one).collect::<Result<Vec<_>, _>>()?, 0)
        };
        let cut = |x: &[DTensor]| x[0].rope(&x[1].detach(), &x[2].detach(), 2, RopePairs::Halves);
        cases.push(Case::new("rope of each element", &inputs, cut, elements));
    }
    // Queries, and keys with fewer heads.
    for pairs in [RopePairs::Halves, RopePairs::Neighbors] {
        let inputs: [Input; 4] =
            [(&[2, 3, 5, 4], Float), (&[2, 1, 5, 4], Float), (&[7, 2], Float), (&[7, 2], Float)];
        let both = move |x: &[DTensor]| {
            let [q, k] = x[0].rope_both(&x[1], &x[2].detach(), &x[3].detach(), 2, pairs)?;
            q.add(&k)
        };
        let alone = move |x: &[Tensor]| {
            let turned = |x: &Tensor, cos: &Tensor, sin: &Tensor| {
                kernels::rope(x, &cos.detach(), &sin.detach(), 2, pairs)
            };
            turned(&x[0], &x[2], &x[3])?.broadcast_add(&turned(&x[1], &x[2], &x[3])?)
        };
        cases.push(Case::new(&format!("rope of both {pairs:?}"), &inputs, both, alone));
    }
    sweep("rope", cases);
}

#[test]
fn softmax_of_masked_scores() {
    let shapes: [[&[usize]; 2]; 5] =
        [[&[4, 6], &[6]], [&[5, 3], &[5, 3]], [&[2, 3, 5], &[3, 5]], [&[2, 3, 5], &[2, 1, 5]], [&[3], &[3]]];
    let case = |[x, mask]: [&'static [usize]; 2]| {
        let plain = |x: &[Tensor]| candle_nn::ops::softmax(&(&x[0] * 0.7)?.broadcast_add(&x[1])?, D::Minus1);
        Case::new("masked_softmax", &[(x, Float), (mask, Float)], |x| x[0].masked_softmax(&x[1], 0.7), plain)
    };
    sweep("masked_softmax", shapes.map(case).to_vec());
}

/// Query, key and value: heads that divide by the ranks, that do not, in groups of several sizes, with one key head.
const SHAPES: [[&[usize]; 3]; 6] = [
    [&[2, 4, 3, 2], &[2, 4, 3, 2], &[2, 4, 3, 2]],
    [&[1, 3, 2, 2], &[1, 3, 4, 2], &[1, 3, 4, 1]],
    [&[2, 4, 3, 2], &[2, 2, 3, 2], &[2, 2, 3, 2]],
    [&[1, 6, 2, 2], &[1, 2, 3, 2], &[1, 2, 3, 1]],
    [&[2, 3, 2, 2], &[2, 1, 2, 2], &[2, 1, 2, 2]],
    // Few queries: results over shards of the keys are joined.
    [&[1, 4, 1, 2], &[1, 2, 9, 2], &[1, 2, 9, 3]],
];

#[test]
fn attention() {
    let softmax = |scores: &Tensor| candle_nn::ops::softmax(scores, D::Minus1);
    let mut cases = Vec::new();
    for [q, k, v] in SHAPES {
        let inputs: [Input; 3] = [(q, Float), (k, Float), (v, Float)];
        cases.push(Case::new(
            "attention",
            &inputs,
            |x| x[0].scaled_dot_product_attention(&x[1], &x[2], AttentionMask::None, None),
            move |x| plain::attention(x, softmax),
        ));
        cases.push(Case::new(
            "causal attention",
            &inputs,
            |x| x[0].scaled_dot_product_attention(&x[1], &x[2], AttentionMask::Causal, None),
            |x| plain::attention(x, |scores| kernels::causal_softmax(scores, 1.0)),
        ));
    }
    sweep("attention", cases);
}

#[test]
fn attention_of_capped_scores() {
    let mut cases = Vec::new();
    for ([q, k, v], cap) in SHAPES.into_iter().flat_map(|shapes| [(shapes, None), (shapes, Some(1.5))]) {
        let mask: &[usize] = Box::leak(Box::new([q[2], k[2]]));
        let inputs: [Input; 4] = [(q, Float), (k, Float), (v, Float), (mask, Float)];
        cases.push(Case::new(
            &format!("attention with a cap of {cap:?}"),
            &inputs,
            move |x| {
                x[0].capped_attention(&x[1], &x[2], &x[3], 1.0 / (x[0].dim(D::Minus1)? as f64).sqrt(), cap)
            },
            move |x| plain::attention(&x[..3], capped_softmax(&x[3], cap)),
        ));
    }
    sweep("capped_attention", cases);
}

#[test]
fn attention_with_sinks() {
    let mut cases = Vec::new();
    for [q, k, v] in SHAPES {
        let sinks: &[usize] = Box::leak(Box::new([q[1]]));
        let inputs: [Input; 4] = [(q, Float), (k, Float), (v, Float), (sinks, Float)];
        let made = |x: &[DTensor]| {
            let [q, k, v] = [x[0].transpose(1, 2)?, x[1].transpose(1, 2)?, x[2].transpose(1, 2)?];
            let options = candle_shard::Attention::default().log_sums(true);
            options.of(&q, &k, &v)?.with_sinks(&x[3], q.dtype())?.transpose(1, 2)
        };
        let plain = |x: &[Tensor]| {
            plain::attention(&x[..3], |scores| {
                let (b, h, queries, keys) = scores.dims4()?;
                let sinks = x[3].reshape((1, h, 1, 1))?.broadcast_as((b, h, queries, 1))?;
                candle_nn::ops::softmax(&Tensor::cat(&[scores, &sinks], 3)?, D::Minus1)?.narrow(3, 0, keys)
            })
        };
        cases.push(Case::new("attention with sinks", &inputs, made, plain));
    }
    sweep("attention with sinks", cases);
}

#[test]
fn a_sink_of_minus_infinity_is_none_and_sinks_that_do_not_fit_are_refused() {
    on_ranks(2, "no sinks", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let x = test_utils::values(&[1, 5, 3, 4], 1, DType::F64);
        let x = test_utils::distribute(&x, &mesh, &[Shard(2)])?;
        let attention = candle_shard::Attention::default().causal(true).window(2);
        let sinks = |sinks: &[f64]| {
            let whole = Tensor::new(sinks, &candle_core::Device::Cpu)?;
            test_utils::distribute(&whole, &mesh, &[Shard(0)])
        };
        let with = attention.clone().log_sums(true).of(&x, &x, &x)?;
        assert_eq!(with.dims(), [1, 5, 3, 5]);
        let made = with.with_sinks(&sinks(&[f64::NEG_INFINITY; 3])?, DType::F64)?;
        let want = attention.of(&x, &x, &x)?;
        assert!(test_utils::distance(&made.full_tensor()?, &want.full_tensor()?) < 1e-14);
        let said = with.with_sinks(&sinks(&[0.0; 2])?, DType::F64).unwrap_err().to_string();
        assert!(said.contains("with_sinks") && said.contains("[h]"), "{said}");
        Ok(())
    });
}

/// The softmax of masked scores, which are in ±cap if there is a cap.
fn capped_softmax(mask: &Tensor, cap: Option<f64>) -> impl Fn(&Tensor) -> candle_core::Result<Tensor> {
    move |scores| {
        let scores = match cap {
            Some(cap) => ((scores / cap)?.tanh()? * cap)?,
            None => scores.clone(),
        };
        candle_nn::ops::softmax(&scores.broadcast_add(mask)?, D::Minus1)
    }
}

#[test]
fn attention_of_rows() {
    let mut cases = Vec::new();
    for shapes in SHAPES {
        let rows_first = |shape: &'static [usize]| -> &'static [usize] {
            let &[b, h, s, d] = shape else { unreachable!() };
            Box::leak(Box::new([b, s, h, d]))
        };
        let inputs: [Input; 3] = shapes.map(|shape| (rows_first(shape), Float));
        let swapped =
            |x: &[Tensor]| x.iter().map(|x| x.transpose(1, 2)?.contiguous()).collect::<Result<Vec<_>, _>>();
        cases.push(Case::new(
            "flash_attn",
            &inputs,
            |x| x[0].flash_attn(&x[1], &x[2], 1.0 / 2f64.sqrt(), false),
            move |x| {
                plain::attention(&swapped(x)?, |scores| candle_nn::ops::softmax(scores, D::Minus1))?
                    .transpose(1, 2)
            },
        ));
        cases.push(Case::new(
            "causal flash_attn",
            &inputs,
            |x| x[0].flash_attn(&x[1], &x[2], 1.0 / 2f64.sqrt(), true),
            move |x| {
                plain::attention(&swapped(x)?, |scores| kernels::causal_softmax(scores, 1.0))?.transpose(1, 2)
            },
        ));
    }
    sweep("flash_attn", cases);
}

#[test]
fn attention_with_an_additive_mask() {
    let shapes: [[&[usize]; 4]; 3] = [
        [&[2, 4, 3, 2], &[2, 4, 3, 2], &[2, 4, 3, 2], &[3, 3]],
        [&[2, 4, 2, 2], &[2, 2, 3, 2], &[2, 2, 3, 2], &[2, 1, 2, 3]],
        [&[1, 3, 2, 2], &[1, 1, 2, 2], &[1, 1, 2, 2], &[3, 1, 2]],
    ];
    let case = |[q, k, v, m]: [&'static [usize]; 4]| {
        let inputs: [Input; 4] = [(q, Float), (k, Float), (v, Float), (m, Float)];
        Case::new(
            "masked attention",
            &inputs,
            |x| x[0].scaled_dot_product_attention(&x[1], &x[2], AttentionMask::Additive(&x[3]), None),
            |x| {
                plain::attention(x, |scores| {
                    candle_nn::ops::softmax(&scores.broadcast_add(&x[3])?, D::Minus1)
                })
            },
        )
    };
    sweep("masked attention", shapes.map(case).to_vec());
}

#[test]
fn sharded_heads_attend_without_communication() {
    on_ranks(2, "heads", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2)])?;
        let put = |shape: &[usize], at| {
            DTensor::distribute(&crate::common::values(shape, 1, DType::F64), &mesh, &[at])
        };
        let [q, kv, one] =
            [put(&[2, 4, 3, 2], Shard(1))?, put(&[2, 2, 3, 2], Shard(1))?, put(&[2, 1, 3, 2], Replicate)?];
        for (key, mask) in
            [(&kv, AttentionMask::Causal), (&kv, AttentionMask::None), (&one, AttentionMask::Causal)]
        {
            let (out, counts) = comm::record(|| q.scaled_dot_product_attention(key, key, mask, None));
            let out = out?;
            assert_eq!(
                (counts.total(), out.placements()),
                (0, &[Shard(1)][..]),
                "{counts} for {}",
                key.spec()
            );
        }
        Ok(())
    });
}

#[test]
fn attention_on_uneven_groups_equals_one_device() {
    on_ranks(4, "more ranks than key heads", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 4)])?;
        let whole = [[1, 8, 3, 2], [1, 2, 3, 2], [1, 2, 3, 2]]
            .map(|s| crate::common::values(&s, s[1] as u64, DType::F64));
        let want = plain::attention(&whole, |scores| candle_nn::ops::softmax(scores, D::Minus1))?;
        let q = DTensor::distribute(&whole[0], &mesh, &[Shard(1)])?;
        let [k, v] = [1, 2].map(|i| DTensor::distribute(&whole[i], &mesh, &[Replicate]));
        // Every rank has 2 of the 8 heads, half a group: it uses copies of the key heads, and no head moves.
        let (out, counts) =
            comm::record(|| q.scaled_dot_product_attention(&k?, &v?, AttentionMask::None, None));
        assert_eq!(counts.total(), 0, "{counts}");
        let out = out?;
        assert_eq!(out.to_local().dims(), [1, 2, 3, 2]);
        let error = (out.full_tensor()? - want)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
        assert!(error < 1e-13, "{error}");
        Ok(())
    });
}
