//! Checks of everything that could stop the program later, made before it does any work.

use candle_pipe::Pipeline;

use super::args::{Args, RunName, VOCAB_SIZE};
use super::corpus::Corpus;
use crate::arguments::{ANY, check_counts, check_positive};
use crate::cli::{Checked, Output, UsageError, require};

/// Checks the flags and reads the text.
///
/// # Errors
/// A sentence that names the flag, its value and a remedy.
pub fn validate(args: &Args) -> Checked<Corpus> {
    check_numbers(args)?;
    check_size(args)?;
    check_heads(args)?;
    check_use(args)?;
    check_runs(args)?;
    check_pipeline(args)?;
    let corpus = read_text(args)?;
    if let (Some(text), Some(json)) = (&args.text, &args.json) {
        require!(
            text != json,
            "--json {} is also --text: the text would be lost, give another file.",
            json.display()
        );
    }
    Output::new(args.json.as_deref()).check()?;
    Ok(corpus)
}

fn check_numbers(args: &Args) -> Checked {
    check_counts([
        ("--tp", args.tp.unwrap_or(1), ANY),
        ("--cp", args.cp.unwrap_or(1), ANY),
        ("--ep", args.ep.unwrap_or(1), ANY),
        ("--fsdp", args.fsdp.unwrap_or(1), ANY),
        ("--experts", args.experts.unwrap_or(1), ANY),
        ("--top-k", args.top_k.unwrap_or(1), ANY),
        ("--threads", args.threads.unwrap_or(1), MOST_THREADS),
        ("--dim", args.dim, ANY),
        ("--layers", args.layers, ANY),
        ("--heads", args.heads, ANY),
        ("--steps", args.steps, MOST_STEPS),
        ("--seq", args.seq, ANY),
        ("--batch", args.batch, ANY),
    ])?;
    if let Some(norm) = args.clip_norm {
        check_positive("--clip-norm", norm, "1")?;
    }
    let Args { lr, dropout, tolerance, .. } = *args;
    check_positive("--lr", lr, "something around 0.001")?;
    require!(
        (0.0..1.0).contains(&dropout),
        "--dropout {dropout} is outside [0, 1): use 0 for none, or a small probability such as 0.1."
    );
    require!(
        tolerance.is_finite() && tolerance >= 0.0,
        "--tolerance {tolerance} is not a finite number of at least 0: try 0.0001."
    );
    Ok(())
}

/// The most memory of one training, in GiB.
const MOST_GIB: f64 = 64.0;

/// The largest numbers of steps and threads.
const MOST_STEPS: usize = 100_000_000;
const MOST_THREADS: usize = 1024;

/// The most ranks of a run.
const MOST_RANKS: usize = 1024;

/// Refuses models that are too large, before anything is allocated.
fn check_size(args: &Args) -> Checked {
    let [dim, layers, heads, seq, batch] =
        [args.dim, args.layers, args.heads, args.seq, args.batch].map(|value| value as f64);
    // A weight, its gradient and two moments; about twenty activations per layer, and three square matrices per head.
    // An expert has three matrices of half that width, and on one device it computes all tokens.
    let experts = args.mixture().0 as f64;
    let parameters = (VOCAB_SIZE as f64 + seq) * dim + layers * (12.0 + 6.0 * experts) * dim * dim;
    let of_layer = (20.0 + 12.0 * experts) * dim + 3.0 * heads * seq;
    let activations = batch * seq * (layers * of_layer + 4.0 * VOCAB_SIZE as f64);
    let gib = (16.0 * parameters + 8.0 * activations) / f64::from(1 << 30);
    let fits = gib <= MOST_GIB;
    let experts = args.experts.map(|experts| format!(" --experts {experts}")).unwrap_or_default();
    require!(
        fits,
        "--dim {dim} --layers {layers} --heads {heads} --seq {seq} --batch {batch}{experts} would take about {gib:.0} GiB of memory: make some of them smaller, for at most {MOST_GIB} GiB."
    );
    Ok(())
}

fn check_heads(args: &Args) -> Checked {
    let Args { dim, heads, .. } = *args;
    require!(
        dim.is_multiple_of(heads),
        "--dim {dim} is not divisible by --heads {heads}: use a multiple of {heads}, such as {}.",
        next_multiple(dim, heads)
    );
    Ok(())
}

/// Refuses flags that no run uses.
fn check_use(args: &Args) -> Checked {
    let runs = args.runs();
    let has = |names: &[RunName]| runs.iter().any(|run| names.contains(run));
    let pipelines = [RunName::Pp, RunName::PpSp];
    for (flag, is_given) in [
        ("--pp", args.pp.is_some()),
        ("--dp", args.dp.is_some()),
        ("--fsdp", args.fsdp.is_some()),
        ("--schedule", args.schedule.is_some()),
        ("--microbatches", args.microbatches.is_some()),
    ] {
        require!(
            !is_given || has(&pipelines),
            "{flag} is for pipelines, and --runs has none: add pp to --runs, or leave out {flag}."
        );
    }
    require!(
        args.tp.is_none() || has(&[RunName::Tp, RunName::TpSp]) || has(&pipelines),
        "--tp is for runs on several ranks, and --runs has none: add tp to --runs, or leave out --tp."
    );
    require!(
        args.cp.is_none() || has(&[RunName::Cp]) || has(&pipelines),
        "--cp is for the runs cp and pp, and --runs has neither: add one to --runs, or leave out --cp."
    );
    require!(
        args.ep.is_none() || has(&[RunName::Ep]) || has(&pipelines),
        "--ep is for the runs ep and pp, and --runs has neither: add one to --runs, or leave out --ep."
    );
    check_zigzag(args)?;
    check_experts(args)
}

/// Refuses zigzag order where there is none, or where it would change the model.
fn check_zigzag(args: &Args) -> Checked {
    let runs = args.runs();
    let is_cut = (runs.contains(&RunName::Cp) && args.context_parallel() > 1)
        || (runs.contains(&RunName::Pp) && args.cp.is_some_and(|cp| cp > 1));
    require!(
        !args.zigzag || is_cut,
        "--zigzag is an order of sequences that are cut, and no run cuts them: add --cp, or leave out --zigzag."
    );
    require!(
        !args.zigzag || args.dropout == 0.0,
        "--zigzag moves tokens, and the masks of --dropout {} are drawn by place: use --dropout 0, or leave out --zigzag.",
        args.dropout
    );
    require!(
        args.cp.unwrap_or(1) == 1 || !runs.contains(&RunName::PpSp),
        "--cp {} cuts the sequences that the run pp_sp cuts over --tp: use the run pp, or leave out --cp.",
        args.cp.unwrap_or(1)
    );
    Ok(())
}

/// Refuses experts that do not fit each other.
fn check_experts(args: &Args) -> Checked {
    let (experts, top_k) = args.mixture();
    require!(
        args.top_k.is_none() || experts > 0,
        "--top-k is for experts, and the model has none: add --experts, or leave out --top-k."
    );
    require!(
        top_k <= experts || experts == 0,
        "--top-k {top_k} is more than the {experts} experts: use at most {experts}, or more --experts."
    );
    Ok(())
}

fn check_runs(args: &Args) -> Checked {
    let (cp, seq) = (args.context_parallel(), args.seq);
    require!(
        cp <= MOST_RANKS || !args.runs().contains(&RunName::Cp),
        "--cp {cp} are too many ranks for one process: use at most {MOST_RANKS}."
    );
    require!(
        cp <= seq || !args.runs().contains(&RunName::Cp),
        "--cp {cp} is more than the {seq} positions of --seq: use at most {seq} ranks."
    );
    let ep = args.expert_parallel();
    require!(
        ep <= MOST_RANKS || !args.runs().contains(&RunName::Ep),
        "--ep {ep} are too many ranks for one process: use at most {MOST_RANKS}."
    );
    let (ranks, heads) = (args.tensor_parallel(), args.heads);
    if args.runs().iter().any(|run| matches!(run, RunName::Tp | RunName::TpSp)) {
        for (rows, what) in [
            (VOCAB_SIZE, format!("the {VOCAB_SIZE} rows of the token embedding")),
            (args.seq, format!("the {} positions of --seq", args.seq)),
            (heads, format!("the {heads} heads of --heads")),
        ] {
            require!(ranks <= rows, "--tp {ranks} is more than {what}: use at most {rows}.");
        }
    }
    Ok(())
}

fn check_pipeline(args: &Args) -> Checked {
    let runs = args.runs();
    if !runs.iter().any(|run| matches!(run, RunName::Pp | RunName::PpSp)) {
        return Ok(());
    }
    let pipeline = args.pipeline();
    let Pipeline { pp, dp, tp, microbatches, .. } = pipeline;
    check_counts([
        ("--pp", pp, ANY),
        ("--dp", dp, ANY),
        ("--tp", tp, ANY),
        ("--microbatches", microbatches, ANY),
    ])?;
    let ranks = args.pipeline_ranks().filter(|&ranks| ranks <= MOST_RANKS);
    let others: String = args.stage_axes()[..3]
        .iter()
        .filter(|(_, n)| *n > 1)
        .map(|(axis, n)| format!(" × --{axis} {n}"))
        .collect();
    require!(
        ranks.is_some(),
        "--pp {pp} × --dp {dp}{others} × --tp {tp} are too many ranks for one process: use at most {MOST_RANKS}."
    );
    let cp = args.cp.unwrap_or(1);
    require!(
        cp <= args.seq,
        "--cp {cp} is more than the {} positions of --seq: use at most {} ranks.",
        args.seq,
        args.seq
    );
    let Args { heads, batch, layers, seq, .. } = *args;
    require!(tp <= heads, "--tp {tp} is more than the {heads} heads of --heads: use at most {heads}.");
    require!(
        tp <= VOCAB_SIZE,
        "--tp {tp} is more than the {VOCAB_SIZE} rows of the token embedding: use at most {VOCAB_SIZE}."
    );
    require!(
        tp <= seq || !runs.contains(&RunName::PpSp),
        "--tp {tp} is more than the {seq} positions of --seq: use at most {seq} ranks."
    );
    let parts = dp.saturating_mul(microbatches);
    require!(
        parts <= batch,
        "--batch {batch} has too few sequences for --dp {dp} × --microbatches {microbatches}: use a batch of at least {parts}."
    );
    let (stages, most) = (pipeline.stages(), args.pipe(false).most_stages());
    let name = pipeline.kind;
    require!(
        stages <= most,
        "--pp {pp} with --schedule {name} takes {stages} stages, but --layers {layers} can be cut into {most} at most: use --layers {} or more, or fewer ranks.",
        layers + stages - most
    );
    pipeline.schedule().map(drop).map_err(|error| {
        UsageError(format!("--pp {pp} --microbatches {microbatches} do not fit --schedule {name}: {error}."))
    })
}

fn read_text(args: &Args) -> Checked<Corpus> {
    let name = args
        .text
        .as_deref()
        .map_or("the built-in text".to_owned(), |path| format!("--text {}", path.display()));
    let text = Corpus::read(args.text.as_deref()).map_err(|error| {
        UsageError(format!(
            "{name} cannot be read ({error}): give a readable file, or no --text for the built-in one."
        ))
    })?;
    require!(!text.is_empty(), "{name} is empty: give a file with some text in it.");
    let needed = args.seq + 1;
    require!(
        text.len() >= needed,
        "{name} has {} bytes, but --seq {} needs {needed}: give a longer text, or a --seq of at most {}.",
        text.len(),
        args.seq,
        text.len() - 1
    );
    Ok(Corpus::new(text, args))
}

/// Returns the first multiple of `of` that is at least `n`.
fn next_multiple(n: usize, of: usize) -> usize {
    n.div_ceil(of).saturating_mul(of)
}
