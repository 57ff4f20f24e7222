//! Token shift and convolutions along a sequence that is cut: what travels, in shards of any sizes.
use candle_core::{DType, Tensor, Var};
use candle_dist::{Op, comm};
use candle_shard::{Conv, Replicate, Result, Shard, Spec, strict};
use std::ops::Range;
use test_utils::{Lay, Leaf, distribute, on_ranks, value_error, values};

use crate::plain;

/// The bytes of an element in this file.
const F64: usize = 8;

/// Even, uneven and empty shards, some narrower than a halo.
const SIZES: [[usize; 4]; 6] =
    [[3, 3, 3, 3], [5, 1, 2, 4], [0, 12, 0, 0], [6, 0, 0, 6], [1, 1, 1, 9], [0, 0, 11, 1]];
const LEN: usize = 12;

/// The rows that a rank sends, where a rank with the rows `piece` of the result needs `window` of them.
fn sent(sizes: [usize; 4], me: usize, window: impl Fn(Range<i64>) -> Range<i64>) -> usize {
    let piece = |rank: usize| {
        let start: usize = sizes[..rank].iter().sum();
        start as i64..(start + sizes[rank]) as i64
    };
    let needs = |rank: usize| if sizes[rank] == 0 { 0..0 } else { window(piece(rank)) };
    let others = (0..4).filter(|&rank| rank != me);
    others.map(|rank| piece(me).filter(|row| needs(rank).contains(row)).count()).sum()
}

/// The rows whose gradients a rank sends back.
fn sent_back(sizes: [usize; 4], me: usize, window: impl Fn(Range<i64>) -> Range<i64>) -> usize {
    let start: usize = sizes[..me].iter().sum();
    let own = start as i64..(start + sizes[me]) as i64;
    if sizes[me] == 0 {
        0
    } else {
        window(own.clone()).filter(|row| (0..LEN as i64).contains(row) && !own.contains(row)).count()
    }
}

#[test]
fn a_token_shift_sends_the_tokens_that_change_hands() {
    on_ranks(4, "shift", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("cp", 4)])?;
        let (whole, up) = (values(&[2, LEN, 3], 1, DType::F64), values(&[2, LEN, 3], 2, DType::F64));
        for sizes in SIZES {
            for by in [1, -1, 2, 5, -7, 12, 100] {
                let spec = Spec::new(&mesh, &[Shard(1)], whole.shape(), DType::F64)?
                    .with_sizes(0, Some(sizes.to_vec().into()))?;
                let leaf = Leaf::with_spec(&whole, spec.clone(), &[Lay::At(Shard(1))])?;
                let (made, forward) = comm::record(|| strict(|| leaf.tensor.shift(1, by)));
                let made = made?;
                assert_eq!(*made.spec(), spec);
                let var = Var::from_tensor(&whole)?;
                let want = plain::shift(&var, 1, by)?;
                assert_eq!(value_error(&made, &want)?, 0.0, "{sizes:?} by {by}");
                let loss = made.mul(&distribute(&up, &mesh, &[Replicate])?)?.sum_all()?;
                let (grads, backward) = comm::record(|| loss.backward());
                let of_whole = (want * &up)?.sum_all()?.backward()?;
                assert_eq!(
                    leaf.gradient_error(&grads?, of_whole.get(&var).unwrap())?,
                    0.0,
                    "{sizes:?} by {by}"
                );
                let far = by as i64;
                let there = sent(sizes, ctx.rank(), |piece| piece.start - far..piece.end - far);
                assert_eq!(forward.total_bytes(), there * 2 * 3 * F64, "{sizes:?} by {by}: {forward}");
                assert_eq!(forward.get(Op::AllToAll).count, forward.total(), "{forward}");
                // The gradients go back to where the tokens came from.
                let back = sent_back(sizes, ctx.rank(), |piece| piece.start - far..piece.end - far);
                assert_eq!(
                    (backward.total_bytes(), backward.get(Op::AllToAll).count),
                    (back * 2 * 3 * F64, backward.total())
                );
            }
        }
        Ok(())
    });
}

#[test]
fn a_convolution_along_a_sequence_sends_its_halo() {
    on_ranks(4, "convolutions", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("cp", 4)])?;
        let (whole, kernel) = (values(&[2, 3, LEN], 1, DType::F64), values(&[3, 1, 4], 2, DType::F64));
        for sizes in SIZES {
            let spec = Spec::new(&mesh, &[Shard(2)], whole.shape(), DType::F64)?
                .with_sizes(0, Some(sizes.to_vec().into()))?;
            for dilation in [1, 2] {
                let conv = Conv { groups: 3, dilation, ..Conv::default() };
                let x = Leaf::with_spec(&whole, spec.clone(), &[Lay::At(Shard(2))])?;
                let w = Leaf::new(&kernel, &mesh, &[Lay::At(Replicate)])?;
                let (made, forward) =
                    comm::record(|| strict(|| x.tensor.causal_conv1d(&w.tensor, None, conv)));
                let made = made?;
                assert_eq!(*made.spec(), spec, "as the input");
                let halo = 3 * dilation as i64;
                let there = sent(sizes, ctx.rank(), |piece| piece.start - halo..piece.end);
                assert_eq!(forward.total_bytes(), there * 2 * 3 * F64, "{sizes:?}: {forward}");
                let loss = made.sum_all()?;
                let (grads, backward) = comm::record(|| loss.backward());
                let grads = grads?;
                // The gradients of the halos, and that of the kernel.
                assert_eq!(backward.get(Op::AllReduce).count, 1, "{backward}");
                assert_eq!(backward.get(Op::AllToAll).count + 1, backward.total(), "{backward}");
                let vars = [Var::from_tensor(&whole)?, Var::from_tensor(&kernel)?];
                let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
                let want = plain::causal_conv1d(&inputs, conv)?;
                assert!(value_error(&made, &want)? < 1e-12, "{sizes:?}");
                let of_whole = want.sum_all()?.backward()?;
                for (leaf, var) in [&x, &w].into_iter().zip(&vars) {
                    let error = leaf.gradient_error(&grads, of_whole.get(var).unwrap())?;
                    assert!(error < 1e-12, "{sizes:?}, dilation {dilation}: {error:e}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_longer_or_shorter_result_lies_in_default_sizes() {
    on_ranks(4, "lengths", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("cp", 4)])?;
        let (whole, kernel) = (values(&[1, 2, LEN], 1, DType::F64), values(&[3, 2, 3], 2, DType::F64));
        let x = distribute(&whole, &mesh, &[Shard(2)])?;
        let w = distribute(&kernel, &mesh, &[Replicate])?;
        for (padding, stride, places) in [(0, 1, 10), (2, 1, 14), (1, 2, 6), (0, 5, 2)] {
            let conv = Conv { padding, stride, ..Conv::default() };
            let (made, counts) = comm::record(|| strict(|| x.conv1d(&w, None, conv)));
            let made = made?;
            assert_eq!((made.dims(), made.placements()), (&[1, 3, places][..], &[Shard(2)][..]));
            assert_eq!(counts.get(Op::AllToAll).count, counts.total(), "{counts}");
            assert!(
                value_error(&made, &plain::conv(&[whole.clone(), kernel.clone()], conv)?)? < 1e-12,
                "{conv:?}"
            );
        }
        Ok(())
    });
}
