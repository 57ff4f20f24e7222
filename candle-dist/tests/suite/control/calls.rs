//! Ranks that end while others wait for them, and calls that are compared.
use super::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::backend::{Call, Form};
use candle_dist::control::{channel, group_id};
use candle_dist::{Cause, Collective, Error, Op, ReduceOp};
use std::sync::Barrier;

fn debug(options: InitOptions) -> InitOptions {
    options.debug(true)
}

#[track_caller]
fn all_reduce(len: usize) -> Call {
    let x = Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
    Call::on(Collective::AllReduce(ReduceOp::Sum), &x)
}

#[track_caller]
fn message(op: Op, peer: usize, (len, tag): (usize, u32)) -> Call {
    let x = Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
    let side = match op {
        Op::Send => Collective::Send { to: peer, tag },
        _ => Collective::Recv { from: Some(peer), tag },
    };
    Call::on(side, &x)
}

#[test]
fn a_rank_that_ends_stops_only_those_who_wait_for_a_round_it_never_entered() {
    for culprit in [0, 2] {
        let waiting = Barrier::new(2);
        let texts = world(3, |control| {
            let group = group_id(&[0, 1, 2], 0);
            for round in 0..3 {
                drop(control.enter(group, &[0, 1, 2], round, &Call::new(Collective::Barrier)).unwrap());
            }
            if control.rank() == culprit {
                return None;
            }
            // Round 2 again: it was started before and is now waited for. The culprit has entered it.
            let entered = control.enter(group, &[0, 1, 2], 2, &Call::new(Collective::Barrier));
            std::thread::sleep(Duration::from_millis(100));
            assert!(control.failure().is_none());
            drop(entered);
            waiting.wait();
            let entered = control.enter(group, &[0, 1, 2], 3, &Call::new(Collective::Barrier));
            let text = heard(&control);
            if let Err(error) = entered {
                assert_eq!(error.to_string(), text);
            }
            assert_eq!(control.failure().unwrap().cause, Cause::Returned { rank: culprit });
            assert_eq!(control.fail(Cause::Deadlock).to_string(), text, "the first cause counts");
            Some(text)
        });
        let text = common(&texts.into_iter().flatten().collect::<Vec<_>>());
        assert!(
            text.starts_with(&format!("rank {culprit} returned while other ranks wait for it")),
            "{text}"
        );
        assert!(text.contains(&format!("rank {culprit}: returned")), "{text}");
        assert!(text.contains("barrier at ") && text.contains("tests/suite/control/calls.rs:"), "{text}");
    }
}

#[test]
fn a_message_that_was_sent_is_not_missed() {
    world(2, |control| {
        let id = channel(group_id(&[0, 1], 0), 1, 0, 7);
        if control.rank() == 1 {
            drop(control.enter(id, &[1, 0], 0, &message(Op::Send, 0, (3, 0))).unwrap());
            return;
        }
        let entered = control.enter(id, &[1, 0], 0, &message(Op::Recv, 1, (3, 0))).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        assert!(control.failure().is_none());
        drop(entered);
        // A second message never comes. Sending to a rank that has ended waits for nothing.
        drop(control.enter(channel(5, 0, 1, 0), &[0, 1], 0, &message(Op::Send, 1, (3, 0))).unwrap());
        let entered = control.enter(id, &[1, 0], 1, &message(Op::Recv, 1, (3, 0)));
        assert!(heard(&control).starts_with("rank 1 returned while other ranks wait for it"));
        drop(entered);
    });
}

#[test]
fn equal_calls_pass_in_debug_mode() {
    let rounds = world_with(4, debug, |control| {
        let (all, odd) = (group_id(&[0, 1, 2, 3], 0), group_id(&[1, 3], 0));
        for round in 0..50 {
            drop(control.enter(all, &[0, 1, 2, 3], round, &all_reduce(3)).unwrap());
            if control.rank() % 2 == 1 {
                drop(control.enter(odd, &[1, 3], round, &all_reduce(round as usize)).unwrap());
            }
        }
        assert!(control.failure().is_none());
        50
    });
    assert_eq!(rounds, [50; 4]);
}

#[test]
fn calls_on_two_groups_may_be_started_in_any_order() {
    world_with(2, debug, |control| {
        let mut groups = [3, 4];
        if control.rank() == 1 {
            groups.reverse();
        }
        let call = Call { form: Form::Started, ..all_reduce(3) };
        for group in groups {
            drop(control.enter(group, &[0, 1], 0, &call).unwrap());
        }
        for group in groups {
            drop(control.enter(group, &[0, 1], 0, &call).unwrap());
        }
    });
}

#[test]
fn a_mismatch_names_both_calls_on_every_rank() {
    let cases = [
        ("op", all_reduce(4), Call::new(Collective::Barrier)),
        ("shape", all_reduce(4), all_reduce(5)),
        (
            "reduction",
            all_reduce(4),
            Call { collective: Collective::AllReduce(ReduceOp::Max), ..all_reduce(4) },
        ),
        (
            "description",
            Call::new(Collective::Barrier),
            Call { note: Some("other".into()), ..Call::new(Collective::Barrier) },
        ),
    ];
    let site = |call: &Call| format!("{call}");
    for (what, right, wrong) in cases {
        for culprit in [0, 1, 2] {
            let texts = world_with(3, debug, |control| {
                let call = if control.rank() == culprit { &wrong } else { &right };
                let error = control.enter(9, &[0, 1, 2], 0, call).map(drop).unwrap_err();
                let Error::Group(failure) = &error else { panic!("{error}") };
                let (rank, reference) = (if culprit == 0 { 1 } else { culprit }, 0);
                assert!(
                    matches!(failure.cause, Cause::Mismatch { rank: r, reference: f, what: w } if (r, f, w) == (rank, reference, what)),
                    "{failure}"
                );
                error.to_string()
            });
            let text = common(&texts);
            assert!(text.contains(&site(&right)) && text.contains(&site(&wrong)), "{text}");
        }
    }
}

#[test]
fn the_two_sides_of_a_message_are_compared() {
    let texts = world_with(2, debug, |control| {
        let id = channel(1, 0, 1, 0);
        let good = [message(Op::Send, 1, (3, 0)), message(Op::Recv, 0, (3, 0))];
        drop(control.enter(id, &[0, 1], 0, &good[control.rank()]).unwrap());
        let bad = [message(Op::Send, 1, (3, 0)), message(Op::Recv, 0, (4, 0))];
        let _ = control.enter(id, &[0, 1], 1, &bad[control.rank()]);
        heard(&control)
    });
    let text = common(&texts);
    assert!(text.starts_with("rank 1 and rank 0 made different calls (shape differs)"), "{text}");
    assert!(
        text.contains("rank 0: in send(f32[3], to 1) at ")
            && text.contains("rank 1: in recv(f32[4], from 0)")
    );
}

#[test]
fn groups_of_other_members_are_a_mismatch() {
    let texts = world_with(2, debug, |control| {
        let ranks = if control.rank() == 0 { [0, 1] } else { [1, 0] };
        control.enter(3, &ranks, 0, &Call::new(Collective::Barrier)).map(drop).unwrap_err().to_string()
    });
    assert!(common(&texts).contains("list of members differs"));
}

#[test]
fn tags_that_share_a_count_may_be_received_in_any_order() {
    for change in [|options: InitOptions| options, debug] {
        world_with(2, change, |control| {
            let (group, tags) = (control.join(&[0, 1]), [3, 259, 515, 3, 259]);
            let (op, order) =
                if control.rank() == 0 { (Op::Send, [0, 1, 2, 3, 4]) } else { (Op::Recv, [2, 4, 1, 0, 3]) };
            for tag in order.map(|nth| tags[nth]) {
                let call = message(op, 1 - control.rank(), (tag as usize, tag));
                let (channel, nth) = control.message(group.id(), 0, 1, tag);
                drop(control.enter(channel, &[0, 1], nth, &call).unwrap());
            }
        });
    }
}

#[test]
fn a_rank_that_dropped_a_group_and_ended_has_taken_part_in_it() {
    let waiting = Barrier::new(2);
    let texts = world(3, |control| {
        let group = control.join(&[0, 1, 2]);
        drop(control.enter(group.id(), &[0, 1, 2], 0, &Call::new(Collective::Barrier)).unwrap());
        let (channel, nth) = control.message(group.id(), 2, 0, 7);
        if control.rank() == 2 {
            drop(control.enter(channel, &[2, 0], nth, &message(Op::Send, 0, (3, 0))).unwrap());
            return None; // drops the group, then the world
        }
        std::thread::sleep(Duration::from_millis(200));
        // Its started calls and its messages can still be waited for.
        drop(control.enter(group.id(), &[0, 1, 2], 0, &Call::new(Collective::Barrier)).unwrap());
        if control.rank() == 0 {
            drop(control.enter(channel, &[2, 0], nth, &message(Op::Recv, 2, (3, 0))).unwrap());
        }
        waiting.wait();
        assert!(control.failure().is_none());
        let entered = control.enter(group.id(), &[0, 1, 2], 1, &Call::new(Collective::Barrier));
        let text = heard(&control);
        drop(entered);
        Some(text)
    });
    let text = common(&texts.into_iter().flatten().collect::<Vec<_>>());
    assert!(text.starts_with("rank 2 returned while other ranks wait for it"), "{text}");
}

#[test]
fn the_goodbye_after_very_many_groups_and_tags_arrives() {
    const MANY: u64 = 700_000;
    let ended = world(2, |control| {
        let call = Call::new(Collective::Barrier);
        if control.rank() == 0 {
            let world = control.join(&[0, 1]);
            for nth in 0..MANY {
                // Groups that nobody drops, each with one round, and the same number of tags.
                drop(control.enter(nth, &[0, 1], 0, &call).unwrap());
                let (channel, nth) = control.message(world.id(), 0, 1, nth as u32);
                drop(control.enter(channel, &[0, 1], nth, &message(Op::Send, 1, (1, 0))).unwrap());
            }
            return None;
        }
        // Rank 0 is still there, and has not taken part in this round.
        let group = control.join(&[0, 1]);
        std::thread::sleep(Duration::from_millis(10));
        let entered = control.enter(group.id(), &[0, 1], 0, &call);
        let text = heard(&control);
        drop(entered);
        Some(text)
    });
    let text = ended[1].as_deref().unwrap();
    assert!(text.starts_with("rank 0 returned while other ranks wait for it"), "not lost: {text}");
}

#[test]
fn a_monitored_barrier_passes_or_names_everybody_who_is_missing() {
    let limit = Duration::from_millis(300);
    let texts = world(5, |control| {
        let group = control.join(&[0, 1, 2, 3, 4]);
        let within = |limit| Call { timeout: Some(limit), ..Call::new(Collective::Barrier) };
        for round in 0..20 {
            let call = within(limit * 60);
            drop(control.enter_monitored(group.id(), &[0, 1, 2, 3, 4], round, &call).unwrap());
        }
        if [1, 3].contains(&control.rank()) {
            return heard(&control);
        }
        control
            .enter_monitored(group.id(), &[0, 1, 2, 3, 4], 20, &within(limit))
            .map(drop)
            .unwrap_err()
            .to_string()
    });
    let text = common(&texts);
    assert!(text.starts_with("ranks 1, 3 did not come to the barrier within 300ms\n"), "{text}");
}

#[test]
fn rank_0_decides_whether_calls_are_compared() {
    let [on, off] = [0, 1].map(|who| {
        world_with(
            2,
            |options| {
                let rank = LaunchInfo::from_env(&options).unwrap().rank;
                options.debug(rank == who)
            },
            |control| control.enter(1, &[0, 1], 0, &all_reduce(control.rank())).is_err(),
        )
    });
    assert_eq!((on, off), (vec![true; 2], vec![false; 2]));
}

#[test]
fn many_threads_of_a_rank_may_be_in_calls() {
    let meet = Barrier::new(2);
    let texts = world(2, |control| {
        if control.rank() == 0 {
            let waiting = control.enter(1, &[0, 1], 0, &all_reduce(3)).unwrap();
            drop(control.enter(2, &[0], 0, &Call::new(Collective::Barrier)).unwrap());
            meet.wait();
            let text = heard(&control);
            drop(waiting);
            return text;
        }
        meet.wait();
        control.fail(Cause::Failed { rank: 1, message: "stop".into() }).to_string()
    });
    let text = common(&texts);
    assert!(
        text.contains("rank 0: in all_reduce(f32[3], sum) at ")
            && text.contains("rank 1: running, no call yet")
    );
}
