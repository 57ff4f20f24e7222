//! Random options, shapes and meshes against one device.
use super::harness::{Routing, errors, tokens, truth};
use candle_core::DType;
use candle_shard::nn::{ExpertGate, ExpertGroups, MoEConfig, Scores};
use candle_shard::{Replicate, Result, Shard};
use proptest::prelude::*;
use test_utils::on_ranks;

/// Limits that some values exceed.
const CLAMPED: ExpertGate = ExpertGate::Clamped { alpha: 1.702, limit: 0.3 };

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn any_options_on_any_mesh_equal_one_device(
        (batch, seq) in (1usize..4, 0usize..6),
        (hidden, experts, top_k, shared) in (1usize..4, 1usize..9, 1usize..5, 0usize..3),
        (dp, ep, tp) in (1usize..3, 1usize..4, 1usize..3),
        (at, is_sigmoid, is_normalized, groups) in (0usize..4, any::<bool>(), any::<bool>(), 1usize..4),
        (capacity, one_sided, seed) in (proptest::option::of(0.3f64..2.0), any::<bool>(), 0usize..1000),
    ) {
        prop_assume!(dp * ep * tp <= 6 && batch * seq > 0);
        let mut sizes = vec![0; ep];
        (0..experts).for_each(|expert| sizes[(expert * 7 + seed) % ep] += 1);
        // All groups but one, if they hold enough experts.
        let (top_k, chosen) = (top_k.min(experts), groups.saturating_sub(1).max(1));
        let fits = experts.is_multiple_of(groups) && top_k <= chosen * (experts / groups);
        let groups = fits.then_some(ExpertGroups { count: groups, chosen, best: 1 + seed % 3 });
        let scores = if is_sigmoid { Scores::Sigmoid } else { Scores::Softmax };
        let config = MoEConfig::new(6, hidden, experts, top_k)
            .groups(groups)
            .scores(scores)
            .normalize(is_normalized)
            .shared_hidden(shared)
            .shared_gate(shared > 0 && seed % 2 == 0)
            .logit_bias(seed % 3 == 0)
            .expert_bias(seed % 5 < 3)
            .expert_gate(if seed % 7 < 4 { ExpertGate::Silu } else { CLAMPED })
            .capacity_factor(capacity)
            .balance_weight(0.1)
            .z_weight(0.05)
            .expert_axis("ep")
            .expert_sizes(sizes)
            .tensor_axis("tp");
        on_ranks(dp * ep * tp, "any", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", dp), ("ep", ep), ("tp", tp)])?;
            let routing = if one_sided { Routing::OneSided } else { Routing::Random };
            let truth = truth(&config, &[batch, seq, 6], routing, DType::F64)?;
            let at = [
                [Shard(0), Shard(0), Replicate],
                [Shard(0), Shard(1), Replicate],
                [Replicate, Shard(1), Shard(1)],
                [Shard(1), Replicate, Replicate],
            ][at];
            let (error, _) = errors(&config, &truth, tokens(&mesh, &truth, &at, None)?)?;
            assert!(error < 1e-12, "{config:?} [{batch}, {seq}] on {dp} × {ep} × {tp}, {at:?}: {error:e}");
            Ok(())
        });
    }
}
