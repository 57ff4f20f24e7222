//! The names that experts have in files.

/// The names of experts in files, all within a layer.
#[derive(Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// The module of the router.
    pub router: &'static str,
    /// The bias of the choice.
    pub bias: &'static str,
    /// Whether files have that bias as a matrix of one row.
    pub has_bias_row: bool,
    /// The module whose children are the experts, by their numbers.
    pub experts: &'static str,
    /// The layers of an expert: gate, up and down.
    pub layers: [&'static str; 3],
    /// The network that all tokens use, and the module of its gate, as layers call them too.
    pub shared: [&'static str; 2],
    /// The module of the experts in transformers 5, which has the matrices of all of them in two parameters.
    pub module: &'static str,
    /// The tensors of all experts, in files that do not have each expert by itself.
    pub stacks: Option<StackNames>,
}

/// The names of the tensors of all experts of a layer in files that have these in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackNames {
    /// Gates and ups.
    pub gate_up: &'static str,
    /// Downs.
    pub down: &'static str,
    /// How the matrices lie.
    pub layout: StackLayout,
}

/// How the matrices of experts lie in a tensor that has those of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackLayout {
    /// The ups of an expert are below its gates.
    Rows,
    /// The matrices are transposed: the ups of an expert are behind its gates.
    Columns,
    /// The matrices are transposed, with each gate beside its up.
    Interleaved,
}

/// The names of Mixtral's files.
pub static MIXTRAL: ExpertNames = ExpertNames {
    router: "block_sparse_moe.gate",
    bias: "block_sparse_moe.e_score_correction_bias",
    has_bias_row: false,
    experts: "block_sparse_moe.experts",
    layers: ["w1", "w3", "w2"],
    shared: SHARED,
    module: "mlp.experts",
    stacks: None,
};

/// The names of the files of Qwen's mixtures.
pub static QWEN: ExpertNames = ExpertNames {
    router: "mlp.gate",
    bias: "mlp.gate.e_score_correction_bias",
    has_bias_row: false,
    experts: "mlp.experts",
    layers: ["gate_proj", "up_proj", "down_proj"],
    shared: ["mlp.shared_expert", "mlp.shared_expert_gate"],
    module: "mlp.experts",
    stacks: None,
};

/// The names of the files of LFM2's mixtures.
pub static LFM2: ExpertNames = ExpertNames {
    router: "feed_forward.gate",
    bias: "feed_forward.expert_bias",
    has_bias_row: false,
    experts: "feed_forward.experts",
    layers: ["w1", "w3", "w2"],
    shared: SHARED,
    module: "feed_forward.experts",
    stacks: None,
};

/// The names of the files of Granite's mixtures.
pub static GRANITE: ExpertNames = ExpertNames {
    router: "block_sparse_moe.router.layer",
    module: "block_sparse_moe.experts",
    stacks: Some(StackNames {
        gate_up: "block_sparse_moe.input_linear.weight",
        down: "block_sparse_moe.output_linear.weight",
        layout: StackLayout::Rows,
    }),
    ..MIXTRAL
};

/// The names of the files of gpt-oss.
pub static GPT_OSS: ExpertNames = ExpertNames {
    router: "mlp.router",
    stacks: Some(StackNames {
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
        layout: StackLayout::Interleaved,
    }),
    ..QWEN
};

/// The names of the files of DeepSeek's mixtures, and of others that are made like them.
pub static DEEPSEEK: ExpertNames = ExpertNames { shared: SHARED, ..QWEN };

/// The names of the files of EXAONE's mixtures.
pub static EXAONE: ExpertNames = ExpertNames { bias: "mlp.e_score_correction_bias", ..DEEPSEEK };

/// The names of the files of Mistral's mixtures.
pub static MISTRAL: ExpertNames = ExpertNames {
    stacks: Some(StackNames {
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
        layout: StackLayout::Rows,
    }),
    ..DEEPSEEK
};

/// The names of the files of Gemma's mixtures.
pub static GEMMA: ExpertNames = ExpertNames {
    router: "router.proj",
    experts: "experts",
    stacks: Some(StackNames {
        gate_up: "experts.gate_up_proj",
        down: "experts.down_proj",
        layout: StackLayout::Rows,
    }),
    ..QWEN
};

/// The names of the files of Llama's mixtures.
pub static LLAMA: ExpertNames = ExpertNames {
    router: "feed_forward.router",
    experts: "feed_forward.experts",
    module: "feed_forward.experts",
    stacks: Some(StackNames {
        gate_up: "feed_forward.experts.gate_up_proj",
        down: "feed_forward.experts.down_proj",
        layout: StackLayout::Columns,
    }),
    ..QWEN
};

/// The names of the files of HunYuan's mixtures.
pub static HUNYUAN: ExpertNames =
    ExpertNames { router: "mlp.gate.wg", shared: ["mlp.shared_mlp", "mlp.shared_expert_gate"], ..QWEN };

/// The names of the files of ERNIE's mixtures.
pub static ERNIE: ExpertNames =
    ExpertNames { bias: "mlp.moe_statics.e_score_correction_bias", has_bias_row: true, ..DEEPSEEK };

/// The names of the files of NVIDIA's hybrids. Experts have no gate.
pub static NEMOTRON: ExpertNames = ExpertNames {
    router: "mixer.gate",
    bias: "mixer.gate.e_score_correction_bias",
    experts: "mixer.experts",
    module: "mixer.experts",
    ..DEEPSEEK
};

const SHARED: [&str; 2] = ["mlp.shared_experts", "mlp.shared_expert_gate"];
