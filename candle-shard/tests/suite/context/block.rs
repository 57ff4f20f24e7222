//! A whole Transformer on sequence shards: only attention and the gradients of parameters communicate.
use candle_core::{DType, Device, Tensor};
use candle_dist::Op;
use candle_dist::comm::{self, CommCounts};
use candle_shard::kernels::RopePairs;
use candle_shard::nn::{MeshVarBuilder, Mode};
use candle_shard::parallel::Plan;
use candle_shard::{Replicate, Result, Shard, TokenOrder};
use std::collections::BTreeMap;
use test_utils::model_args::ModelArgs;
use test_utils::toy::Transformer;
use test_utils::{distance, distribute, on_device, on_ranks, reference, values};

const BATCH: usize = 2;
const LAYERS: usize = 2;

fn args(dropout_p: f64, seq: usize) -> ModelArgs {
    ModelArgs {
        n_layers: LAYERS,
        vocab_size: 11,
        max_seq_len: seq,
        dim: 8,
        n_heads: 4,
        dropout_p,
        use_attn_mask: true,
        ..ModelArgs::default()
    }
}

fn ids(seq: usize, step: u32) -> candle_core::Result<Tensor> {
    let ids: Vec<u32> = (0..(BATCH * seq) as u32).map(|i| (i * step + 3) % 11).collect();
    Tensor::from_vec(ids, (BATCH, seq), &Device::Cpu)
}

#[test]
fn a_transformer_on_sequence_shards_equals_one_device() {
    for world in 1..=5 {
        on_ranks(world, "block", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("cp", world)])?;
            for (seq, dropout) in [(13, 0.0), (3, 0.0), (13, 0.2)] {
                let args = args(dropout, seq);
                let (tokens, targets) = (ids(seq, 5)?, ids(seq, 7)?);
                let plain = reference::Transformer::new(&args, DType::F64, &Device::Cpu)?;
                let want = plain.forward(&tokens, reference::Mode::Train { step: 1 })?;
                let want_loss = plain.loss(&want, &targets)?;
                let want_grads = want_loss.backward()?;
                let want_grads: BTreeMap<&String, _> =
                    plain.vars().iter().map(|(name, var)| (name, want_grads.get(var))).collect();

                let vb = MeshVarBuilder::fresh(args.seed, &mesh, Plan::new("cp"), DType::F64, ctx.device())?;
                let model = Transformer::new(&args, &vb)?;
                let parameters = vb.finish()?;
                let cut = |x: &Tensor| distribute(x, &mesh, &[Shard(1)]);
                let (tokens, targets) = (cut(&tokens)?, cut(&targets)?);
                let (logits, forward) = comm::record(|| model.forward(&tokens, Mode::Train { step: 1 }));
                let logits = logits?;
                let (loss, of_loss) = comm::record(|| logits.cross_entropy(&targets));
                let loss = loss?;
                let (grads, backward) = comm::record(|| parameters.backward(&loss));
                let grads = grads?;
                if dropout == 0.0 && world > 1 {
                    assert_eq!(logits.placements(), [Shard(1)]);
                    let swaps = [&forward, &backward].map(|counts| counts.get(Op::AllToAll).count);
                    let of_keys = [Op::Send, Op::Recv, Op::Barrier, Op::AllGather, Op::ReduceScatter];
                    let messages = |counts: &CommCounts| of_keys.iter().map(|&op| counts.get(op).count).sum();
                    // Of 3 or 4 ranks each has one of the 4 heads; of 2 ranks one has keys that the other sees.
                    let by_heads = swaps[0] > 0;
                    assert!(seq < 13 || by_heads == matches!(world, 3 | 4), "{world}: {forward}");
                    let want =
                        if by_heads { [2 * LAYERS; 2] } else { [messages(&forward), messages(&backward)] };
                    assert_eq!(
                        [forward.total(), backward.total()],
                        [want[0], want[1] + 1],
                        "{forward}, {backward}"
                    );
                    assert!(!by_heads || swaps == want, "{forward}, {backward}");
                    assert_eq!(
                        [forward.get(Op::ReduceScatter).count, backward.get(Op::AllGather).count],
                        [0; 2]
                    );
                    assert_eq!(
                        (of_loss.total(), backward.get(Op::AllReduce).count),
                        (0, 1),
                        "{of_loss} {backward}"
                    );
                }
                let error = distance(&logits.full_tensor()?, &want);
                assert!(error < 1e-12, "logits of {seq} on {world}, dropout {dropout}: {error:e}");
                assert!(distance(&loss.full_tensor()?, &want_loss) < 1e-12);
                for parameter in parameters.iter() {
                    let got = parameter.grad(&grads)?.expect("a gradient").full_tensor()?;
                    let want = want_grads[&parameter.name].expect("a gradient");
                    let error = distance(&got, want);
                    assert!(
                        error < 1e-12,
                        "{} of {seq} on {world}, dropout {dropout}: {error:e}",
                        parameter.name
                    );
                }
            }
            Ok(())
        });
    }
}

#[test]
fn rotary_positions_follow_the_order_of_the_tokens() {
    for world in [2, 3] {
        on_ranks(world, "rope", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("cp", world)])?;
            let order = TokenOrder::zigzag(13, world);
            let (x, cos, sin) = (
                values(&[2, 3, 13, 4], 1, DType::F64),
                values(&[13, 2], 2, DType::F64),
                values(&[13, 2], 3, DType::F64),
            );
            let want = candle_shard::kernels::rope(&x, &cos, &sin, 0, RopePairs::Halves)?;
            let cut = on_device(&order.distribute(&x, 2, &mesh, &[Shard(2)])?)?;
            let table = |x: &Tensor| distribute(&order.apply(x, 0)?, &mesh, &[Replicate]);
            let (cos, sin) = (table(&cos)?, table(&sin)?);
            let (got, counts) = comm::record(|| cut.rope(&cos, &sin, 0, RopePairs::Halves));
            assert_eq!(counts.total(), 0, "{counts}");
            assert_eq!(distance(&order.undo(&got?.full_tensor()?, 2)?, &want), 0.0);
            Ok(())
        });
    }
}
