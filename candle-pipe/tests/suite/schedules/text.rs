//! Actions, schedules and programs as text.
use super::schedule;
use candle_pipe::schedule::{Action, Edges, Lowering, Program, Schedule, ScheduleKind, parse_csv};
use candle_pipe::{EqualCount, In, LossReduction, PipeBuilder};

/// As editors of spreadsheets write them.
#[test]
fn a_text_may_begin_with_a_byte_order_mark_and_end_lines_with_returns() {
    let text = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n";
    let odd = format!("\u{feff}{}", text.replace('\n', "\r\n"));
    assert_eq!(Schedule::from_csv(&odd).unwrap().to_csv(), text);
    assert!(Schedule::from_csv(&text.replace("1B0", "\u{feff}1B0")).is_err());
}

#[test]
fn actions_are_read_and_written_alike() {
    let texts = [
        "0F0",
        "12B345",
        "2I1",
        "3W7",
        "(0F3;7B0)OVERLAP_F_B",
        "(1F0;2I0)OVERLAP_F_B",
        "1SEND_F3",
        "2RECV_F3",
        "2SEND_B3",
        "1RECV_B3",
        "0SEND_F3>2",
        "2RECV_F3<0",
        "2SEND_B3>0",
        "0RECV_B3<2",
        "1WAIT_SEND_F3",
        "1WAIT_SEND_B3",
        "0WAIT_SEND_F1>4",
        "1UNSHARD",
        "1RESHARD",
        "1REDUCE_GRAD",
        "1WAIT_REDUCE_GRAD",
        "0SHARED_REDUCE",
    ];
    for text in texts {
        let action: Action = text.parse().unwrap();
        assert_eq!(action.to_string(), text);
        assert_eq!(format!("  {text} ").parse::<Action>().unwrap(), action);
        let json = serde_json::to_string(&action).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<Action>(&json).unwrap(), action);
    }
    // A neighbor need not be named.
    assert_eq!("1SEND_F3>2".parse::<Action>().unwrap(), "1SEND_F3".parse().unwrap());
}

#[test]
fn what_is_no_action_is_refused_whole() {
    let texts = [
        "",
        "F0",
        "2F",
        "2",
        "2F0xyz",
        "2X0",
        "2f0",
        "-1F0",
        "+1F0",
        "2F+1",
        "2F-1",
        "2F0 1",
        "1SEND_F",
        "1SEND_F3>",
        "1SEND_F3<2",
        "1RECV_F3>0",
        "1SEND_F3>1",
        "1SEND_F3>0",
        "0SEND_B3",
        "0RECV_F0",
        "1UNSHARD0",
        "1UNSHARD>2",
        "2F0>1",
        "(0F0)OVERLAP_F_B",
        "(0F0;1B0;2B0)OVERLAP_F_B",
        "(1B0;0F0)OVERLAP_F_B",
        "(0F0;1W0)OVERLAP_F_B",
        "(0F0;1SEND_F0)OVERLAP_F_B",
        "(0F0;1B0)",
        "(0F0;1B0)F",
        "0F99999999999999999999",
        "99999999999999999999F0",
        "0OVERLAP_F_B",
        "²F0",
    ];
    for text in texts {
        let error = text.parse::<Action>().unwrap_err().to_string();
        assert!(error.contains(&format!("{text:?} is no action")), "{error}");
    }
    let error = parse_csv("0F0,0B0\n1F0,junk\n").unwrap_err().to_string();
    assert!(error.contains("rank 1, position 1") && error.contains("\"junk\""), "{error}");
}

#[test]
fn every_kind_comes_back_from_text_and_json() {
    for kind in ScheduleKind::all() {
        assert_eq!(kind.to_string().to_uppercase().parse::<ScheduleKind>().unwrap(), kind);
        let schedule = kind.schedule(3, 6, kind.stages_per_rank()).unwrap();
        assert_eq!(Schedule::from_csv(&schedule.to_csv()).unwrap(), schedule, "{kind}");
        let json = serde_json::to_string(&schedule).unwrap();
        assert_eq!(serde_json::from_str::<Schedule>(&json).unwrap(), schedule, "{kind}");

        let lowering =
            Lowering::new(Edges::chain(schedule.stages())).shared([vec![0, schedule.stages() - 1]]).reduced();
        let program = schedule.lower(&lowering).unwrap();
        assert_eq!(Program::from_csv(&program.to_csv()).unwrap(), program, "{kind}");
        let json = serde_json::to_string(&program).unwrap();
        assert_eq!(serde_json::from_str::<Program>(&json).unwrap(), program, "{kind}");
        assert_eq!(*program.schedule(), schedule, "{kind}");
    }
}

#[test]
fn a_program_of_a_model_keeps_what_messages_carry_in_json() {
    let mut g = PipeBuilder::<()>::new();
    let x = g.input("x", In::Arg);
    let first = g.func("first", |xs, _| Ok(xs[0].clone()), [x]);
    let second = g.func("second", |xs, _| Ok(xs[0].clone()), [first]);
    let third = g.func("third", |xs, _| Ok(xs[0].clone()), [first, second]);
    g.loss(third, LossReduction::Sum);
    let pipe = g.finish(EqualCount(3)).unwrap();
    let program = schedule("1f1b", 3, 2, 1).lower(&Lowering::of(pipe.info()).unwrap()).unwrap();
    let json = serde_json::to_string(&program).unwrap();
    assert_eq!(serde_json::from_str::<Program>(&json).unwrap(), program);
    // Those of a chain carry no value that has a name.
    let chain = schedule("1f1b", 3, 2, 1).lower(&Lowering::new(program.edges().clone())).unwrap();
    assert_eq!(chain.ranks(), program.ranks());
    assert_ne!(chain, program);
}

#[test]
fn blank_lines_at_the_end_are_no_ranks() {
    let text = schedule("zb-h1", 3, 6, 1).to_csv();
    for blank in ["\n", "\n\n", "  \n\t\n"] {
        let with = format!("{text}{blank}");
        assert_eq!(Schedule::from_csv(&with).unwrap().to_csv(), text);
        assert_eq!(Schedule::from_csv(&with.replace('\n', "\r\n")).unwrap().to_csv(), text);
    }
    let lowered = schedule("zb-h1", 3, 6, 1).lower(&Lowering::new(Edges::chain(3))).unwrap();
    assert_eq!(Program::from_csv(&format!("{}\n", lowered.to_csv())).unwrap(), lowered);
}

#[test]
fn what_is_loaded_is_checked() {
    assert!(serde_json::from_str::<Schedule>(r#"[["0F0"],["1F0","1B0"]]"#).is_err());
    assert!(serde_json::from_str::<Program>(r#"{"edges":[[1],[]],"ranks":[["0F0"],["1F0"]]}"#).is_err());
    assert!(serde_json::from_str::<Edges>("[[1],[0]]").is_err());
    assert_eq!(serde_json::from_str::<Edges>("[[1,2],[2],[]]").unwrap().producers(2), [0, 1]);
    let evaluation: Schedule = serde_json::from_str(r#"[["0F0",null,"0F1"],[null,"1F0","1F1"]]"#).unwrap();
    assert_eq!(evaluation.computes(0).count(), 2);
    assert_eq!(schedule("gpipe", 2, 2, 1).forward_only().to_csv(), "0F0,0F1\n1F0,1F1\n");
}
