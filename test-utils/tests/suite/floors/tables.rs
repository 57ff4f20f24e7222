//! The floors of each crate, and what has none yet.

/// Rooms from the ground up.
pub(super) type Floors = [&'static [&'static str]];

/// A crate with the floors of its folders; `""` is the crate itself.
type House = (&'static str, &'static [(&'static str, &'static Floors)]);

pub(super) const FLOORS: [House; 2] = [CANDLE_DIST, CANDLE_PIPE];

const CANDLE_DIST: House = (
    "candle-dist",
    &[
        (
            "",
            &[
                &["bits", "call", "guide", "hash", "link", "threads", "values"],
                &["comm", "error"],
                &["freeable", "launch", "tree"],
                &["control"],
                &["backend"],
                &["group", "store"],
                &["functional", "mesh", "train"],
                &["world"],
                &["init"],
            ],
        ),
        (
            "backend",
            &[
                &["element", "runs", "sink", "storage"],
                &["fresh", "guards", "overwrite"],
                &["ready", "reduce", "regions", "unfinished"],
                &["device", "outputs"],
                &["collective", "mod"],
                &["local", "mpi", "simulated", "wrapping"],
                &["nccl"],
            ],
        ),
        ("call", &[&["dtypes", "op", "reduce_op"], &["mod"], &["cut"]]),
        ("comm", &[&["event"], &["scope", "trace"], &["counts", "log"]]),
        (
            "control",
            &[
                &["departed", "ids", "limits"],
                &["activity", "signature"],
                &["message", "rounds"],
                &["hub", "watch"],
                &["server"],
                &["dial"],
                &["mod"],
            ],
        ),
        ("error", &[&["failure"], &["end", "mod"]]),
        ("launch", &[&["launchers", "options", "slurm"], &["mod"]]),
        ("link", &[&["deadline", "frame", "hello"], &["mod"]]),
        ("mesh", &[&["layout", "root"], &["mod"], &["build", "derive"]]),
        ("train", &[&["clip", "grads", "verify"], &["accumulate", "sync"], &["data_parallel"]]),
        ("tree", &[&["mod", "rename"], &["pack"]]),
        ("world", &[&["context", "engines"], &["processes"], &["mod"]]),
    ],
);

const CANDLE_PIPE: House = (
    "candle-pipe",
    &[(
        "",
        &[
            &["action", "cuts", "guide", "nearest"],
            &["error"],
            &["grads", "schedule", "value"],
            &["graph"],
            &["microbatch", "nn", "tape"],
            &["pipe", "step"],
            &["local_pipe", "runtime"],
        ],
    )],
);

/// Crates with folders that have no floors, each with the number of its rooms that are in rings.
pub(super) const RINGS: [(&str, &[(&str, usize)]); 2] = [
    ("candle-dist", &[("backend/local", 3), ("backend/mpi", 8), ("backend/nccl", 2), ("group", 2)]),
    ("candle-shard", &[("", 16)]),
];
