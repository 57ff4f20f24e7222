//! The floors of each crate.

/// Rooms from the ground up: a line for each floor.
pub(super) type Floors = [&'static str];

/// A folder of a crate.
pub(super) struct Folder {
    /// Its path from the crate's root, which is `""`.
    pub(super) path: &'static str,
    pub(super) floors: &'static Floors,
    /// Imports that still point up and are to go: which room imports which.
    pub(super) up: &'static [(&'static str, &'static str)],
}

/// A crate with its folders.
pub(super) const FLOORS: [(&str, &[Folder]); 5] = [
    ("candle-dist-base", CANDLE_DIST_BASE),
    ("candle-dist", CANDLE_DIST),
    ("candle-dist-kernels", CANDLE_DIST_KERNELS),
    ("candle-shard", CANDLE_SHARD),
    ("candle-pipe", CANDLE_PIPE),
];

/// A folder in which nothing points up.
const fn folder(path: &'static str, floors: &'static Floors) -> Folder {
    Folder { path, floors, up: &[] }
}

const CANDLE_DIST_BASE: &[Folder] = &[
    folder("", &["bits empty fresh reduce_op strips sums", "edges"]),
    folder("edges", &["slot", "kept value", "node", "apply"]),
];

const CANDLE_DIST: &[Folder] = &[
    folder(
        "",
        &[
            "call guide hash link readme rows switch threads values warning",
            "comm error",
            "freeable launch tree",
            "control",
            "backend",
            "copies group store",
            "functional mesh row_changes",
            "train",
            "world",
            "init prelude testing",
        ],
    ),
    folder(
        "backend",
        &[
            "cuda element recent runs sink strips",
            "storage",
            "fresh guards overwrite",
            "reduce regions started",
            "device outputs",
            "collective mod",
            "mpi simulated threads wrapping",
            "nccl",
        ],
    ),
    Folder {
        path: "backend/threads",
        floors: &["sync", "loan wait", "rounds", "members", "mailbox", "rendezvous", "mod"],
        // A round, a message and the state of the world wait for each other.
        up: &[("mailbox", "rendezvous"), ("members", "rendezvous")],
    },
    Folder {
        path: "backend/mpi",
        floors: &[
            "agree header native patience ring room shapes sums",
            "mail plan shared transfer",
            "place ways work",
            "host wire",
            "progress",
            "operation",
            "known open",
            "driver",
            "keeper",
            "mod",
        ],
        // `mod` starts the backend; `plan` holds places in memory; an operation is made of a call that was kept, and of parts.
        up: &[
            ("keeper", "mod"),
            ("operation", "known"),
            ("progress", "known"),
            ("progress", "operation"),
            ("shapes", "plan"),
        ],
    },
    Folder {
        path: "backend/nccl",
        floors: &[
            "abort assemblies compare ctas devices errors limit marks plan posts reduction values",
            "costs handle watch",
            "comm",
            "lanes parked",
            "rank",
            "pools transfer",
            "lane launches",
            "backend",
            "mod",
        ],
        // A communicator belongs to a rank, which aborts it or parks it; a message on its way belongs to one too.
        up: &[("comm", "rank"), ("lanes", "rank"), ("parked", "rank")],
    },
    folder("call", &["cut dtypes op site", "collective", "mod"]),
    folder("comm", &["event", "scope trace", "counts log"]),
    Folder {
        path: "control",
        floors: &[
            "departed digests ids limits",
            "activity arguments signature",
            "message rounds terms",
            "hub watch",
            "server",
            "dial",
            "mod",
            "decide",
        ],
        // A rank 0 whose port is taken calls who holds it.
        up: &[("server", "dial")],
    },
    folder("error", &["printable", "failure", "end mod"]),
    Folder {
        path: "group",
        floors: &[
            "under_way",
            "mod",
            "check compared failure object posted gather_text subgroup",
            "pending",
            "call",
            "aliases point_to_point",
        ],
        // A group holds its receives that were started.
        up: &[("mod", "posted")],
    },
    Folder {
        path: "launch",
        floors: &["host launchers slurm", "secret_file", "secret", "options", "mod"],
        // A launch has its secret, and a secret is that of a launch.
        up: &[("secret", "mod"), ("secret_file", "mod"), ("secret_file", "secret")],
    },
    folder("link", &["deadline frame key silence", "hello", "mod"]),
    folder("mesh", &["layout root", "mod", "build derive"]),
    folder("train", &["host sharded", "clip grads verify", "accumulate sync", "data_parallel", "local_sgd"]),
    folder("train/local_sgd", &["options", "outer", "mod", "state"]),
    folder("tree", &["mod rename", "pack"]),
    folder("world", &["backends context", "processes", "mod"]),
];

const CANDLE_DIST_KERNELS: &[Folder] = &[
    folder(
        "",
        &[
            "device_text registers",
            "mod real",
            "bounds conv div element nvrtc parallel prefetch row_order rule weight_sink",
            "device_rows random rows",
            "fused",
            "convert few_rows numbers product row_put row_take rows_off_host",
            "embedding_off_host float_op master row_sum",
            "row_update",
            "dense_update",
            "rules",
            "adam_w cross_entropy embedding function layer_norm linear logcumsumexp pool quantized renorm reshape \
             rms_norm rope short_conv softmax",
            "add attention embedding_bag grouped_linear masked_softmax silu_gate",
            "clamped_gate flash_attn linear_attention",
            "parts",
        ],
    ),
    folder("device_rows", &["launch", "cuda", "mod"]),
    folder(
        "fused",
        &[
            "call",
            "cuda emulated",
            "run",
            "adam_w cross_entropy dropout function largest norm put rope softmax strips",
            "candidates",
        ],
    ),
    folder("function", &["mod", "formulas off_host", "apply"]),
    folder("linear_attention", &["sizes", "scan", "backward inputs", "composed", "mod"]),
    folder(
        "product",
        &["matrix", "columns", "panels", "pairs", "pair_operand", "operands", "weight_rows", "mod"],
    ),
    folder("random", &["distribution grid stream", "draws launch", "device", "mod"]),
    folder(
        "quantized",
        &[
            "blocks format",
            "inputs lanes",
            "avx2 avx512 kernel portable",
            "tiles",
            "floats",
            "scaled",
            "matrix",
            "product",
        ],
    ),
];

const CANDLE_SHARD: &[Folder] = &[
    folder(
        "",
        &[
            "error guide kernels porting readme scoped",
            "layout strict",
            "agreement explain lookup visualize",
            "tensor",
            "autograd",
            "redistribute",
            "files rules",
            "ops",
            "fsdp parallel",
            "nn",
            "prelude tables",
        ],
    ),
    folder("autograd", &["counts hooks nesting off_graph order", "shared", "mod"]),
    folder("files", &["disk regular", "digests lock", "index", "weights", "checkpoint"]),
    folder("files/checkpoint", &["agreement saved", "export save", "stages"]),
    folder("fsdp", &["no_sync nodes options", "shared", "unit", "pass", "run sharder", "mod"]),
    Folder {
        path: "files/weights",
        floors: &[
            "dtypes entry runs",
            "gguf",
            "header write",
            "file",
            "read",
            "schemes",
            "mod",
            "indexed names quantized",
        ],
        // A weight of a scheme is read like any other, from tensors that are.
        up: &[("schemes", "mod")],
    },
    folder("layout", &["axes block placement", "spec", "description stored_name width"]),
    folder("lookup", &["label options", "mod", "bags limit"]),
    folder(
        "nn",
        &[
            "adapter kv_cache mode moved parameters place",
            "optim source",
            "var_builder",
            "dropout fully_shard init",
            "lora",
            "dynamic_tanh embedding linear norm recompute",
            "constructors fused_qkv latent module rnn",
            "quantized",
            "batch_norm conv group_norm moe prelu sequence_cache sequential",
        ],
    ),
    folder(
        "nn/moe",
        &[
            "mod",
            "config expert_bytes",
            "load",
            "capacity dispatch quantized router shared",
            "experts losses",
            "layer",
        ],
    ),
    // A cache holds its keys and values in one memory where it can.
    Folder { path: "nn/kv_cache", floors: &["layout", "mod", "pair texts"], up: &[("mod", "pair")] },
    folder("nn/lora", &["active", "layer", "filters table", "builder"]),
    folder(
        "nn/optim",
        &["mod params schedule", "slot", "group", "element options", "adagrad adam_w sgd", "muon"],
    ),
    folder("nn/optim/muon", &["exchange owners params", "orthogonal", "mod"]),
    folder(
        "ops",
        &[
            "activation attention fallback grid group_norm halo join lookup loss operand pixels pool reduce reshape scan \
             slice unary units",
            "aliases conv cross_entropy dropout einsum embedding extreme in_place index operators pointwise scatter",
            "compare matmul product recurrent rowwise softmax view",
            "order truth",
        ],
    ),
    folder("parallel", &["pattern shares style", "module", "plain plan"]),
    folder("redistribute", &["target whole", "table", "moves", "explained", "mod"]),
    folder("rules", &["observer row", "op_spec", "cache unasked", "mod", "own"]),
    folder("tables", &["sharding_spec sparse", "sharded_tensor", "embedding"]),
    folder("tables/embedding", &["inputs table", "fetch", "mod", "spread"]),
    folder(
        "tables/sharded_tensor",
        &[
            "metadata",
            "mod",
            "compare convert factory from_local local_op moves sharding_plan state_dict",
            "transform",
            "init",
        ],
    ),
    folder("tables/sharding_spec", &["remote_device", "shard_metadata", "chunk enumerable", "mod"]),
    folder("tables/sparse", &["row_grad", "row_var", "optimizer"]),
    folder("tensor", &["lineage registry", "dtensor", "given gradient local tree", "factory named_axes"]),
    folder("visualize", &["mod", "svg text"]),
];

const CANDLE_PIPE: &[Folder] = &[folder(
    "",
    &[
        "action cuts guide nearest readme",
        "error",
        "grads value",
        "graph",
        "microbatch nn schedule tape",
        "pipe pipeline step",
        "batch runtime",
        "local_pipe",
        "prelude",
    ],
)];
