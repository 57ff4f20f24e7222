//! Random models: their parts as data, drawn from a seed and made smaller.
use candle_core::DType;
use candle_pipe::graph::Share;
use candle_shard::ContextWay;
use candle_shard::nn::LoraOptions;
use std::fmt;
use test_utils::Dice;

/// A language model of random parts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Model {
    pub(crate) seed: u64,
    pub(crate) width: usize,
    pub(crate) len: usize,
    pub(crate) vocab: usize,
    pub(crate) rows: usize,
    pub(crate) embedding: Cut,
    /// What the table and the head have beside them, where these are frozen.
    pub(crate) ends: Option<LoraOptions>,
    /// Whether a lookup limits the norms of its rows, in place.
    pub(crate) limited: bool,
    pub(crate) head: Head,
    pub(crate) blocks: Vec<Block>,
    pub(crate) loss: Loss,
    /// Whether parts are stages of a pipeline.
    pub(crate) piped: bool,
    pub(crate) prefetch: bool,
    pub(crate) reshard: bool,
    /// Whether units are sharded over the axis `data`, too.
    pub(crate) both_axes: bool,
    /// Whether a pipeline is one of candle's layers.
    pub(crate) plain: bool,
    /// Whether the caller averages the gradients of replicas of a pipeline.
    pub(crate) beside: bool,
    /// Whether units sum gradients only in the last pass of a step.
    pub(crate) unsynced: bool,
    /// How stages share a declared parameter.
    pub(crate) share: Share,
    /// What the axes `cp` and `ep`, sharded sequences and other optimizers add, if anything.
    pub(crate) more: Option<More>,
}

/// What a model has in set-ups of more axes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct More {
    /// Whether the plan shards the sequence between cut layers.
    pub(crate) sequence: bool,
    pub(crate) causal: bool,
    /// How keys meet queries whose tokens are sharded.
    pub(crate) way: Option<ContextWay>,
    /// Whether experts are distributed over the axis `ep`.
    pub(crate) spread: bool,
    /// Whether the axis `tp` cuts each expert.
    pub(crate) cut_experts: bool,
    pub(crate) optimizer: OptimizerKind,
}

/// An optimizer, and how it is used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum OptimizerKind {
    AdamW,
    /// Two groups, with options of their own.
    Groups,
    Momentum,
    Adagrad,
    Muon,
}

/// How a plan cuts a linear layer or a table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Cut {
    Columns,
    Rows,
    Whole,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Head {
    Linear(Cut),
    /// The table of the embedding.
    Tied,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Loss {
    CrossEntropy,
    MeanSquare,
    /// The sum of the cross entropy and the number of tokens.
    Counted,
    /// The sum over the rows.
    Sum,
}

/// A part of a model, and how it runs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Block {
    pub(crate) layer: Layer,
    /// Whether it is a fully sharded unit, where there is an axis for it.
    pub(crate) unit: bool,
    pub(crate) recompute: bool,
    pub(crate) frozen: bool,
    /// What linear layers have beside weights that are frozen.
    pub(crate) adapter: Option<LoraOptions>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Layer {
    Mlp {
        up: Cut,
        down: Cut,
        bias: bool,
    },
    Norm,
    RmsNorm,
    BatchNorm,
    Dropout,
    Attention {
        cut: bool,
    },
    Lstm {
        cut: bool,
    },
    Gru,
    Conv,
    Experts {
        loss: bool,
    },
    /// A parameter of one element, with this many dims.
    Scale {
        dims: usize,
    },
    /// The module of an earlier block, once more.
    Again(usize),
    /// The result of an earlier block, added.
    Skip(usize),
    /// The result of an earlier block as the memory of attention.
    Cross(usize),
    /// Layers that each rank calls in an order of its own.
    Unordered(usize),
    /// A table of the tokens whose gradient is kept by rows.
    Rows,
    /// A parameter that is declared once, and given to each such block.
    Gain,
    /// A buffer that begins to change in this step.
    Late(u64),
    /// A norm before a recomputed unit.
    Nested,
    /// Layers whose weights stay codes.
    Coded {
        kind: CodeKind,
        up: Cut,
        down: Cut,
    },
}

/// How codes and their scales are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum CodeKind {
    Fp8Blocks,
    Fp8Rows,
    /// Groups of 32 columns.
    Fp8Groups,
    Int8,
    Mxfp4,
    Nvfp4,
}

impl Model {
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let piped = dice.once_in(2);
        let mut blocks: Vec<Block> = Vec::new();
        for at in 0..2 + dice.below(4) {
            let layer = layer(&mut dice, at, &blocks);
            let units = if matches!(layer, Layer::Unordered(_)) { 8 } else { 2 };
            blocks.push(Block {
                layer,
                unit: dice.once_in(units),
                recompute: dice.once_in(3),
                frozen: dice.once_in(6),
                adapter: None,
            });
        }
        // Other seeds have the models that they had when faults were found by them.
        if [0, 3, 5, 6].contains(&(seed % 10)) {
            let mut dice = Dice::new(seed + 7_000_000);
            for block in blocks.iter_mut() {
                let drawn = adapter(&mut dice).filter(|_| !block.frozen);
                // Beside experts there are no magnitudes, no biases and no dropout.
                block.adapter = match block.layer {
                    Layer::Experts { .. } => {
                        drawn.map(|options| options.dora(false).bias(false).dropout(0.0))
                    }
                    _ => drawn,
                };
            }
        }
        let losses = [Loss::CrossEntropy, Loss::MeanSquare, Loss::Counted];
        let model = Self {
            seed,
            width: 4,
            len: 1 + dice.below(3),
            vocab: 7,
            rows: 3 + dice.below(5),
            embedding: cut(&mut dice),
            ends: None,
            limited: false,
            head: if dice.once_in(3) { Head::Tied } else { Head::Linear(cut(&mut dice)) },
            blocks,
            loss: losses[dice.below(if piped { 3 } else { 2 })],
            piped,
            prefetch: !dice.once_in(3),
            reshard: !dice.once_in(3),
            both_axes: false,
            plain: false,
            beside: false,
            unsynced: false,
            share: Share::Transmit,
            more: None,
        };
        let model = model.with_more(&mut Dice::new(seed + 2_000_000));
        let model =
            model.with_blocks(&mut Dice::new(seed + 3_000_000)).with_ends(&mut Dice::new(seed + 8_000_000));
        model.with_codes(&mut Dice::new(seed + 10_000_000))
    }

    /// Draws layers of codes, behind the others.
    fn with_codes(mut self, dice: &mut Dice) -> Self {
        let has_some = [3, 5, 6].contains(&(self.seed % 10)) && !self.plain;
        let adapter = adapter(dice).filter(|_| has_some);
        if let Some(adapter) = adapter {
            let layer = Layer::Coded { kind: dice.pick(&CodeKind::ALL), up: cut(dice), down: cut(dice) };
            let (unit, recompute) = (dice.once_in(2), dice.once_in(3));
            self.blocks.push(Block { layer, unit, recompute, frozen: false, adapter: Some(adapter) });
        }
        self
    }

    /// Draws the adapter of the table, which has no bias, and of the head. Lookups that limit norms change the table beside it.
    fn with_ends(mut self, dice: &mut Dice) -> Self {
        let has_one = [0, 3, 5, 6].contains(&(self.seed % 10)) && !self.limited && !self.plain;
        self.ends = adapter(dice).filter(|_| has_one).map(|options| options.bias(false).dropout(0.0));
        self
    }

    /// Draws what is drawn apart, so that seeds keep the rest.
    fn with_more(self, dice: &mut Dice) -> Self {
        let is_sum = self.piped && dice.once_in(5);
        Self {
            // A tied head would see rows that only other passes look up.
            limited: self.head != Head::Tied && dice.once_in(5),
            loss: if is_sum { Loss::Sum } else { self.loss },
            both_axes: dice.once_in(3),
            ..self
        }
    }

    /// Draws blocks behind the others, and kinds of pipelines.
    fn with_blocks(mut self, dice: &mut Dice) -> Self {
        let mut drawn = Vec::new();
        if dice.once_in(8) {
            drawn.push(Layer::Rows);
        }
        if dice.once_in(6) {
            drawn.extend([Layer::Gain, Layer::Gain]);
        }
        let (late, plain, beside) = (dice.once_in(8), dice.once_in(6), dice.once_in(5));
        self.beside = self.piped && beside && self.loss != Loss::Sum;
        if self.piped && late && !self.beside {
            drawn.push(Layer::Late(1 + dice.below(3) as u64));
        }
        if self.piped && plain {
            // candle's table has no limit.
            (self.plain, self.limited) = (true, false);
        }
        let block =
            |layer| Block { layer, unit: false, recompute: dice.once_in(2), frozen: false, adapter: None };
        self.blocks.extend(drawn.into_iter().map(block).collect::<Vec<_>>());
        self.share = if dice.once_in(2) { Share::Replicate } else { Share::Transmit };
        self.unsynced = !self.piped && dice.once_in(3);
        self
    }

    /// Returns the same model for more axes, and with another optimizer.
    pub(crate) fn with_axes(mut self) -> Self {
        let mut dice = Dice::new(self.seed + 5_000_000);
        self.more = Some(More {
            sequence: dice.once_in(3),
            causal: dice.once_in(2),
            way: dice.pick(&[
                None,
                Some(ContextWay::Gather),
                Some(ContextWay::Ring),
                Some(ContextWay::Heads),
            ]),
            spread: !dice.once_in(3),
            cut_experts: dice.once_in(3),
            optimizer: dice.pick(&[
                OptimizerKind::AdamW,
                OptimizerKind::Groups,
                OptimizerKind::Momentum,
                OptimizerKind::Adagrad,
                OptimizerKind::Muon,
            ]),
        });
        if dice.once_in(3) {
            let at = self.blocks.len();
            let (unit, recompute) = (!dice.once_in(3), dice.once_in(2));
            self.blocks.push(Block { layer: Layer::Nested, unit, recompute, frozen: false, adapter: None });
            if dice.once_in(2) {
                let recompute = dice.once_in(2);
                self.blocks.push(Block {
                    layer: Layer::Again(at),
                    unit: false,
                    recompute,
                    frozen: false,
                    adapter: None,
                });
            }
        }
        // Tokens of few ranks, and ranks without tokens.
        self.len += dice.below(4);
        self
    }

    /// Returns the number of steps before a checkpoint.
    pub(crate) fn steps(&self) -> u64 {
        let late = self.blocks.iter().any(|block| matches!(block.layer, Layer::Late(_)));
        if late { 4 } else { 2 }
    }

    /// Returns models with one thing less.
    pub(crate) fn smaller(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for at in 0..self.blocks.len() {
            // Later blocks may use it.
            let is_used = self.blocks.iter().any(|block| block.layer.earlier() == Some(at));
            if is_used || self.blocks.len() == 1 {
                continue;
            }
            let mut small = self.clone();
            small.blocks.remove(at);
            for block in &mut small.blocks {
                if let Layer::Again(of) | Layer::Skip(of) | Layer::Cross(of) = &mut block.layer
                    && *of > at
                {
                    *of -= 1;
                }
            }
            all.push(small);
        }
        let mut with = |change: &dyn Fn(&mut Self)| {
            let mut small = self.clone();
            change(&mut small);
            all.push(small);
        };
        for at in 0..self.blocks.len() {
            with(&|small| small.blocks[at].unit = false);
            with(&|small| small.blocks[at].recompute = false);
            with(&|small| small.blocks[at].frozen = false);
            // Codes are not trained themselves.
            if !matches!(self.blocks[at].layer, Layer::Coded { .. }) {
                with(&|small| small.blocks[at].adapter = None);
            }
            with(&|small| small.blocks[at].layer = simpler(&small.blocks[at].layer));
        }
        with(&|small| small.embedding = Cut::Whole);
        with(&|small| small.ends = None);
        with(&|small| small.limited = false);
        with(&|small| small.both_axes = false);
        with(&|small| small.plain = false);
        with(&|small| small.beside = false);
        with(&|small| small.unsynced = false);
        with(&|small| small.share = Share::Transmit);
        with(&|small| small.head = Head::Linear(Cut::Whole));
        with(&|small| small.loss = Loss::MeanSquare);
        with(&|small| (small.prefetch, small.reshard) = (false, true));
        with(&|small| small.len = 1);
        let more = |change: fn(&mut More)| move |small: &mut Self| small.more.iter_mut().for_each(change);
        with(&more(|more| more.sequence = false));
        with(&more(|more| more.causal = false));
        with(&more(|more| more.way = None));
        with(&more(|more| more.spread = false));
        with(&more(|more| more.cut_experts = false));
        with(&more(|more| more.optimizer = OptimizerKind::AdamW));
        with(&|small| small.piped = matches!(small.loss, Loss::Counted | Loss::Sum));
        all.retain(|small| small != self);
        all
    }

    /// Returns whether a run in this dtype can be compared: batch norm of roundings has gradients of roundings.
    pub(crate) fn takes(&self, dtype: DType) -> bool {
        dtype == DType::F64
            || !self
                .blocks
                .iter()
                .any(|block| matches!(block.layer, Layer::BatchNorm | Layer::Experts { .. }))
    }
}

impl Model {
    /// Returns whether the loss of a batch is the mean of the losses of its parts. Statistics of a batch are not.
    pub(crate) fn is_divisible(&self) -> bool {
        let of_batch =
            |block: &Block| matches!(block.layer, Layer::BatchNorm | Layer::Experts { loss: true });
        !self.blocks.iter().any(of_batch)
    }
}

impl Layer {
    /// Returns the earlier block that it uses.
    pub(crate) fn earlier(&self) -> Option<usize> {
        match self {
            Self::Again(of) | Self::Skip(of) | Self::Cross(of) => Some(*of),
            _ => None,
        }
    }

    /// Returns whether other blocks may call it again.
    pub(crate) fn is_shareable(&self) -> bool {
        matches!(self, Self::Mlp { .. } | Self::Norm | Self::Dropout | Self::Scale { .. } | Self::BatchNorm)
    }
}

fn cut(dice: &mut Dice) -> Cut {
    dice.pick(&[Cut::Columns, Cut::Rows, Cut::Whole])
}

/// The adapter of a block, if it has one.
fn adapter(dice: &mut Dice) -> Option<LoraOptions> {
    let options = LoraOptions::new(1 + dice.below(3)).alpha(dice.pick(&[1.0, 4.0]));
    let options = options.rank_stabilized(dice.once_in(3)).bias(dice.once_in(4)).dora(dice.once_in(3));
    let options = options.dropout(if dice.once_in(3) { 0.3 } else { 0.0 });
    (!dice.once_in(3)).then_some(options)
}

fn layer(dice: &mut Dice, at: usize, earlier: &[Block]) -> Layer {
    let plain = |dice: &mut Dice| match dice.below(12) {
        0 | 1 => Layer::Mlp { up: cut(dice), down: cut(dice), bias: dice.once_in(2) },
        2 => Layer::Norm,
        3 => Layer::RmsNorm,
        4 => Layer::BatchNorm,
        5 => Layer::Dropout,
        6 => Layer::Attention { cut: dice.once_in(2) },
        7 => Layer::Lstm { cut: dice.once_in(2) },
        8 => Layer::Gru,
        9 => Layer::Conv,
        10 => Layer::Experts { loss: dice.once_in(2) },
        _ => Layer::Scale { dims: dice.below(2) },
    };
    if at == 0 || !dice.once_in(3) {
        return plain(dice);
    }
    let of = dice.below(at);
    match dice.below(4) {
        0 if earlier[of].layer.is_shareable() => Layer::Again(of),
        1 => Layer::Cross(of),
        2 => Layer::Unordered(2 + dice.below(2)),
        _ => Layer::Skip(of),
    }
}

fn simpler(layer: &Layer) -> Layer {
    match layer {
        Layer::Mlp { bias: true, up, down } => Layer::Mlp { bias: false, up: *up, down: *down },
        Layer::Mlp { up, down, .. } if *up != Cut::Whole => {
            Layer::Mlp { bias: false, up: Cut::Whole, down: *down }
        }
        Layer::Mlp { .. } => Layer::Mlp { bias: false, up: Cut::Whole, down: Cut::Whole },
        Layer::Attention { .. } => Layer::Attention { cut: false },
        Layer::Lstm { .. } => Layer::Lstm { cut: false },
        Layer::Experts { .. } => Layer::Experts { loss: false },
        Layer::Unordered(_) => Layer::Unordered(2),
        Layer::Coded { kind, up, .. } if *up != Cut::Whole => {
            Layer::Coded { kind: *kind, up: *up, down: Cut::Whole }
        }
        Layer::Coded { kind, .. } => Layer::Coded { kind: *kind, up: Cut::Whole, down: Cut::Whole },
        other => other.clone(),
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, width, len, vocab, embedding, head, loss, .. } = self;
        writeln!(
            f,
            "seed {seed}: tokens [{}, {len}] of {vocab}, width {width}, embedding {embedding:?}",
            self.rows
        )?;
        for (at, block) in self.blocks.iter().enumerate() {
            write!(f, "  {at}: {:?}", block.layer)?;
            for (is, name) in [(block.unit, "unit"), (block.recompute, "recompute"), (block.frozen, "frozen")]
            {
                if is {
                    write!(f, ", {name}")?;
                }
            }
            if let Some(options) = &block.adapter {
                write!(f, ", {options:?}")?;
            }
            writeln!(f)?;
        }
        write!(f, "  head {head:?}, loss {loss:?}, share {:?}", self.share)?;
        for (is, name) in [
            (self.piped, "piped"),
            (self.prefetch, "prefetch"),
            (self.reshard, "reshard"),
            (self.limited, "limited"),
            (self.both_axes, "both axes"),
            (self.plain, "plain"),
            (self.beside, "beside"),
            (self.unsynced, "unsynced"),
        ] {
            if is {
                write!(f, ", {name}")?;
            }
        }
        self.more.iter().try_for_each(|more| write!(f, ", {more:?}"))
    }
}
