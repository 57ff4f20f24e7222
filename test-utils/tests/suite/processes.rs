//! Ranks that are processes: their results, their failures, and how a job of them ends. Most of this holds for threads too.
use candle_dist::{Error, ReduceOp, Result};
use std::process::Command;
use std::time::Duration;
use test_utils::{Ranks, Scratch, on_ranks, over_mpi, skip};

/// A result that is not sent.
#[derive(Debug, PartialEq)]
struct Own(usize);

#[test]
fn each_process_has_the_results_of_all_ranks() {
    for world in 1..=3 {
        let ranks = on_ranks(world, "ranks", |ctx| Ok::<_, Error>(ctx.rank()));
        assert_eq!(ranks, (0..world).collect::<Vec<_>>());
        let ranks = on_ranks(world, "own", |ctx| Ok::<_, Error>(Own(ctx.rank())));
        assert_eq!(ranks, (0..world).map(Own).collect::<Vec<_>>());
    }
}

#[test]
fn a_rank_is_a_process_where_that_is_asked_for() {
    let found = on_ranks(2, "who", |ctx| {
        Ok::<_, Error>((std::process::id() as usize, ctx.group().backend().name().to_string()))
    });
    let is_apart = over_mpi() && found[0].1 == "mpi";
    assert_eq!(found[0].0 != found[1].0, is_apart, "{found:?}");
}

#[test]
fn a_failure_of_one_rank_is_that_of_all_and_the_next_world_begins() {
    for _ in 0..2 {
        let failed = Ranks::new(2, "cheese").run(|ctx| match ctx.rank() {
            1 => Err(Error::Unsupported("no cheddar".to_string())),
            _ => ctx.group().barrier(),
        });
        let error = failed.unwrap_err();
        assert_eq!(error.rank, 1);
        assert!(error.message.starts_with("[cheese] ") && error.message.contains("no cheddar"), "{error}");
        let failed = Ranks::new(2, "panic").run(|ctx| -> Result<()> {
            assert!(ctx.rank() == 0, "not here");
            ctx.group().barrier()
        });
        let error = failed.unwrap_err();
        assert!(error.rank == 1 && error.message.contains("panicked: not here"), "{error}");
    }
    on_ranks(2, "next", |ctx| ctx.group().barrier());
}

#[test]
fn ranks_share_a_folder() {
    let folder = Scratch::of_ranks("shared");
    let path = folder.path("0.txt");
    on_ranks(2, "folder", move |ctx| -> Result<()> {
        if ctx.rank() == 0 {
            std::fs::write(&path, "from 0").unwrap();
        }
        ctx.group().barrier()?;
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "from 0");
        Ok(())
    });
    let copy = folder.copy();
    std::fs::write(copy.path("0.txt"), "mine").unwrap();
    assert_eq!(std::fs::read_to_string(folder.path("0.txt")).unwrap(), "from 0");
}

/// The variable with the way in which the last rank of the job below ends.
const END: &str = "CANDLE_TEST_END";

/// What the last rank of a job does.
fn end_of_last_rank(end: &str) {
    let end = end.to_string();
    let ranks = Ranks::new(2, "the label").deadline(Duration::from_secs(1));
    let ran = ranks.run(move |ctx| -> Result<()> {
        let x = candle_core::Tensor::ones(1, candle_core::DType::F32, ctx.device())?;
        ctx.group().all_reduce(&x, ReduceOp::Sum)?;
        match (ctx.rank(), &*end) {
            (1, "error") => Err(Error::Unsupported("no cheddar".to_string())),
            (1, "hang") => loop {
                std::thread::sleep(Duration::from_secs(60));
            },
            (1, "abort") => std::process::abort(),
            _ => ctx.group().barrier(),
        }
    });
    ran.unwrap();
}

#[test]
fn a_job_fails_with_its_ranks() {
    if let Ok(end) = std::env::var(END) {
        return end_of_last_rank(&end);
    }
    if over_mpi() {
        return; // a job within a job
    }
    if !cfg!(feature = "mpi") || Command::new("mpirun").arg("--version").output().is_err() {
        return skip("needs mpirun and the feature mpi");
    }
    for (end, said) in [("error", "no cheddar"), ("hang", "[the label] "), ("abort", ""), ("", "1 passed")] {
        let mut command = Command::new("mpirun");
        let test = "processes::a_job_fails_with_its_ranks";
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        // Of Open MPI; MPICH has as many processes as it is asked for.
        command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
        command.env("CANDLE_TEST_BACKEND", "mpi").env(END, end).args(["-n", "2"]);
        command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--test-threads", "1"]);
        let output = command.output().unwrap();
        let text =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert_eq!(output.status.success(), end.is_empty(), "{end}: {text}");
        assert!(text.contains(said), "{end}: {text}");
    }
}
