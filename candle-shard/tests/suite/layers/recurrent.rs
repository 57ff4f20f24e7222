//! Recurrent layers whose hidden units a plan shards.
use super::*;
use candle_dist::Op;
use test_utils::{device, distribute};

fn recurrent() -> impl Iterator<Item = Case> {
    cases().into_iter().filter(|case| ["lstm", "gru"].contains(&case.name))
}

#[test]
fn hidden_units_are_cut_on_five_ranks_and_some_have_none() {
    on_ranks(5, "recurrent", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[5])?;
        for case in recurrent() {
            for at in [Replicate, Shard(0), Shard(1), Shard(2)] {
                check(&case, Cut::Colwise, &mesh, &[at])?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_step_gathers_the_hidden_units_once() {
    on_ranks(3, "recurrent", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let vb = MeshVarBuilder::fresh(1, &mesh, Cut::Colwise.plan(), DType::F64, &device())?.pp("layer");
        let layer = nn::lstm(4, 7, LSTMConfig::default(), &vb)?;
        let parameters = vb.finish()?;
        let x = distribute(&values(&[2, 5, 4], 1, DType::F64), &mesh, &[Replicate])?;
        let (states, forward) = comm::record(|| layer.seq(&x));
        let states = states?;
        assert_eq!((forward.get(Op::AllGather).count, forward.total()), (5, 5), "{forward}");
        assert_eq!(states[4].h.placements(), [Shard(1)]);
        let loss = states[4].h.sqr()?.sum_all()?;
        let (grads, backward) = comm::record(|| parameters.backward(&loss));
        // The state of zeros has no gradient.
        assert_eq!(backward.get(Op::ReduceScatter).count, 4, "{backward}");
        assert!(parameters.iter().all(|parameter| grads.as_ref().unwrap().get(&parameter.var).is_some()));
        Ok(())
    });
}

#[test]
fn fresh_gates_are_the_rows_of_the_whole_parameter() {
    on_ranks(3, "recurrent", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let build = |cut: Cut| {
            let vb = MeshVarBuilder::fresh(1, &mesh, cut.plan(), DType::F64, &device())?.pp("layer");
            nn::gru(2, 4, GRUConfig::default(), &vb)?;
            vb.finish()
        };
        let (whole, cut) = (build(Cut::Whole)?, build(Cut::Colwise)?);
        for parameter in whole.iter() {
            let gates = cut.iter().filter(|gate| gate.name.rsplit_once('.').unwrap().0 == parameter.name);
            let gates = gates.map(|gate| gate.tensor.full_tensor()).collect::<Result<Vec<_>>>()?;
            assert_eq!(gates.len(), 3, "{}", parameter.name);
            let error = value_error(&parameter.tensor, &Tensor::cat(&gates, 0)?)?;
            assert!(error == 0.0, "{}: {error:e}", parameter.name);
        }
        Ok(())
    });
}
