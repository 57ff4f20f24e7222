//! What is sent, against the formula: routed rows only, each once to a rank.
use super::harness::{Routing, TRAIN, build, config, tokens, truth};
use candle_core::DType;
use candle_dist::Op;
use candle_dist::comm::{self, CommCounts};
use candle_shard::{Replicate, Result, Shard, explain, strict};
use std::collections::BTreeSet;
use test_utils::on_ranks;

/// The bytes of an element in this file.
const F64: usize = 8;

#[test]
fn only_routed_rows_travel_and_each_once_to_a_rank() {
    for (world, top_k) in [(2, 2), (3, 3), (4, 2)] {
        for routing in [Routing::Random, Routing::OneSided] {
            on_ranks(world, "bytes", move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("ep", world)])?;
                let config = config(8, top_k);
                let truth = truth(&config, &[13, 6], routing, DType::F64)?;
                let (layer, parameters) = build(&config, &mesh, &truth)?;
                let spec = tokens(&mesh, &truth, &[Shard(0)], None)?;
                let mine = spec.local_block()[0].clone();
                let x = test_utils::distribute(&truth.x, &mesh, &[Shard(0)])?.to_var()?.0;
                let (made, forward) = comm::record(|| strict(|| layer.forward(&x, TRAIN)));
                let made = made?;
                // The choices of one device say which ranks a token goes to; 8 experts in pieces of ceil(8 / world).
                let rank_of = |expert: usize| expert / 8usize.div_ceil(world);
                let targets = |token: usize| -> BTreeSet<usize> {
                    truth.made.choices[token].iter().flatten().map(|&expert| rank_of(expert)).collect()
                };
                let owner = |token: usize| token / 13usize.div_ceil(world);
                let sent: usize = mine.clone().map(|token| targets(token).len()).sum();
                let computed = (0..13).filter(|&token| targets(token).contains(&ctx.rank())).count();
                let traveled =
                    (0..13).flat_map(|t| targets(t).into_iter().filter(move |&r| r != owner(t))).count();
                assert_eq!((made.load.sent, made.load.ranks[ctx.rank()]), (traveled, computed));
                let of = |counts: &CommCounts, op: Op| (counts.get(op).count, counts.get(op).bytes);
                let width = F64 * 6;
                let table = 4 * (1 + world + 8);
                assert_eq!(of(&forward, Op::AllGather), (1, table), "{forward}");
                // Rows, then weights with numbers of experts, then results. A call counts the rows that a rank gives.
                let slips = F64 * 2 * top_k;
                assert_eq!(
                    of(&forward, Op::AllToAll),
                    (3, sent * (width + slips) + computed * width),
                    "{forward}"
                );
                assert_eq!(forward.total(), 4, "{forward}");
                let loss = made.output.sum_all()?;
                let (grads, backward) = comm::record(|| parameters.backward(&loss));
                grads?;
                let weights = F64 * top_k;
                assert_eq!(
                    of(&backward, Op::AllToAll),
                    (3, sent * width + computed * (width + weights)),
                    "{backward}"
                );
                // The router's gradient.
                assert_eq!((of(&backward, Op::AllReduce).0, backward.total()), (1, 4), "{backward}");
                Ok(())
            });
        }
    }
}

#[test]
fn replicated_tokens_need_one_choice_and_one_sum_in_each_pass() {
    on_ranks(3, "replicated", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 3)])?;
        let config = config(8, 2);
        let truth = truth(&config, &[13, 6], Routing::Random, DType::F64)?;
        let (layer, parameters) = build(&config, &mesh, &truth)?;
        let x = test_utils::distribute(&truth.x, &mesh, &[Replicate])?;
        let (made, forward) = comm::record(|| strict(|| layer.forward(&x, TRAIN)));
        let made = made?;
        // The choices, and the sum of the results.
        let choices = 4 * (1 + 13 * 2);
        assert_eq!(
            (forward.get(Op::Broadcast).count, forward.get(Op::Broadcast).bytes),
            (1, choices),
            "{forward}"
        );
        assert_eq!(
            (forward.get(Op::AllReduce).count, forward.total(), made.load.sent),
            (1, 2, 0),
            "{forward}"
        );
        let loss = made.output.sum_all()?;
        let (grads, backward) = comm::record(|| parameters.backward(&loss));
        grads?;
        // The weights of the choices; the input has no gradient.
        assert_eq!((backward.get(Op::AllReduce).count, backward.total()), (1, 1), "{backward}");
        Ok(())
    });
}

#[test]
fn one_rank_sends_nothing_and_the_step_is_explained() {
    on_ranks(1, "one", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 1)])?;
        let config = config(8, 2).capacity_factor(1.0);
        let truth = truth(&config, &[13, 6], Routing::Random, DType::F64)?;
        let (layer, _) = build(&config, &mesh, &truth)?;
        let x = test_utils::distribute(&truth.x, &mesh, &[Shard(0)])?;
        let ((made, told), counts) = comm::record(|| explain(|| layer.forward(&x, TRAIN)));
        assert_eq!(counts.total(), 0, "{counts}");
        assert!(told.ops.iter().any(|op| op.op == "moe"), "{told}");
        assert_eq!(made?.load.ranks.len(), 1);
        Ok(())
    });
}
