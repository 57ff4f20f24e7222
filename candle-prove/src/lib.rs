//! Proofs that a model gives one device's numbers on any mesh.
//!
//! [`prove`] takes a model, its inputs and its loss. A [`Proof`] trains it on one device and in many [`Setup`]s: on all
//! meshes up to a number of ranks, in several dtypes, with several batches, cut in several ways. It compares losses,
//! gradients, norms, parameters after the steps of an optimizer, evaluations, and the same after a checkpoint was loaded
//! on another mesh. What differs comes as a [`Report`] with the smallest set-up that shows it.
//!
#![doc = include_str!("README.md")]

mod budget;
mod compare;
mod failure;
mod faults;
mod feed;
mod model;
mod plain;
mod ranks;
mod report;
mod setup;
mod setups;
mod table;
mod trainer;
mod trajectory;

#[allow(deprecated)]
pub use model::Function;
#[allow(deprecated)]
pub use model::Graph;
#[allow(deprecated)]
pub use model::Input;
#[allow(deprecated)]
pub use model::Layers;
#[allow(deprecated)]
pub use model::PlainGraph;
pub use model::{FunctionKind, GraphKind, LayersKind, Model, ModelInput, PlainGraphKind};
pub use ranks::Ranks;
pub use report::{Report, Verdict};
use setup::KEEP;
pub use setup::Setup;

use candle_core::{DType, Tensor};
use candle_pipe::schedule::ScheduleKind;
use candle_shard::fsdp::FullyShardOptions;
use candle_shard::nn::{Optimizer, Parameters};
use candle_shard::parallel::Plan;
use compare::Comparison;
use model::ModelProgram;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use trainer::Subject;

/// The axis of stages.
const PIPELINE: &str = "pp";
/// The axis of replicas whose gradients are averaged.
const REPLICAS: &str = "dp";
/// The axis of fully sharded units, which shards rows too.
const UNITS: &str = "fsdp";
/// The axis that shards tokens.
const TOKENS: &str = "cp";
/// The schedule of one device.
const FIRST: ScheduleKind = ScheduleKind::GPipe;

/// A model with all that it is proved for. [`prove`] makes one.
pub struct Proof {
    subject: Subject,
    axes: Vec<String>,
    ranks: usize,
    dtypes: Vec<DType>,
    passes: Vec<usize>,
    schedules: Vec<ScheduleKind>,
    exhaustive: bool,
    faults: usize,
    only: Vec<String>,
    deadline: Duration,
}

/// Starts a proof of `model`, on the axes `dp`, `fsdp` and `tp`, or `pp` and `dp` for a pipeline, of up to 4 ranks.
///
/// | axis | cuts |
/// |---|---|
/// | `pp` | a pipeline into stages of equal numbers of nodes |
/// | `dp` | the batch between replicas, whose gradients are averaged |
/// | `fsdp` | the batch, and the parameters of [`FullyShard`](candle_shard::fsdp::FullyShard) units |
/// | `cp` | the [tokens](ModelInput::tokens) of inputs |
/// | the plan's | layers as the [plan](Proof::plan) says |
/// | others | what the model cuts itself, and the rows of inputs if [told](Proof::rows_over) |
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_prove::prove;
/// use candle_shard::DTensor;
/// use candle_shard::nn::{Linear, Mode, MeshVarBuilder};
/// use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
///
/// let model = |vb: &MeshVarBuilder| {
///     let (up, down) = (Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.pp("down"))?);
///     Ok(move |xs: &[DTensor], _: Mode| down.forward(&up.forward(&xs[0])?.gelu()?)?.sqr()?.mean_all())
/// };
/// let report = prove(model)
///     .input("x", &Tensor::arange(0f64, 20., &Device::Cpu)?.sin()?.reshape((5, 4))?)
///     .plan(Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default()))
///     .ranks(2)
///     .run();
/// println!("{report}");
/// report.assert();
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn prove<Kind>(model: impl Model<Kind>) -> Proof {
    let program = model.program();
    let axes: &[&str] = match program {
        ModelProgram::Layers(_) => &[REPLICAS, UNITS, "tp"],
        ModelProgram::Graph(_) => &[PIPELINE, REPLICAS, "tp"],
        ModelProgram::PlainGraph(_) => &[PIPELINE, REPLICAS],
        ModelProgram::Function(_) => &["rows", "tp"],
    };
    let rows = vec![UNITS.to_string(), "rows".to_string()];
    Proof {
        subject: Subject {
            program,
            inputs: Vec::new(),
            plans: Vec::new(),
            rows,
            units: Vec::new(),
            unit_options: FullyShardOptions::default(),
            seed: 42,
            optimizer: None,
            steps: 2,
            is_beside: false,
            is_unsynced: false,
        },
        axes: Vec::new(),
        ranks: 4,
        dtypes: vec![DType::F64, DType::F32, DType::BF16],
        passes: vec![1, 2, 3],
        schedules: vec![ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZbH1, ScheduleKind::Zbv],
        exhaustive: false,
        faults: 0,
        only: Vec::new(),
        deadline: Duration::from_secs(60),
    }
    .axes(axes)
}

impl Proof {
    /// Adds an input with a row of the batch at each index of dim 0. Float inputs are cast to the dtype of a set-up.
    pub fn input(self, name: &str, whole: &Tensor) -> Self {
        self.input_of(ModelInput::new(name, whole))
    }

    /// Adds an input.
    pub fn input_of(mut self, input: ModelInput) -> Self {
        self.subject.inputs.push(input);
        self
    }

    /// Adds a plan; its axis becomes one of the mesh. Several plans are proved one by one.
    pub fn plan(mut self, plan: Plan) -> Self {
        if let Some(axis) = plan.axis().filter(|axis| self.axes.iter().all(|known| known != axis)) {
            self.axes.push(axis.to_string());
        }
        self.subject.plans.push(plan);
        self
    }

    /// Sets the axes of meshes, outermost first.
    pub fn axes(mut self, axes: &[&str]) -> Self {
        self.axes = axes.iter().map(|axis| (*axis).to_string()).collect();
        self.subject.units.retain(|axis| axis != UNITS);
        if self.axes.iter().any(|axis| axis == UNITS) {
            self.subject.units.insert(0, UNITS.to_string());
        }
        self
    }

    /// Adds axes that shard units, besides `fsdp`.
    pub fn units_over(mut self, axes: &[&str]) -> Self {
        for axis in axes {
            if !self.subject.units.iter().any(|known| known == axis) {
                self.subject.units.push((*axis).to_string());
            }
        }
        self
    }

    /// Adds axes that shard the rows of inputs.
    pub fn rows_over(mut self, axes: &[&str]) -> Self {
        self.subject.rows.extend(axes.iter().map(|axis| (*axis).to_string()));
        self
    }

    /// Sets the largest number of ranks.
    pub fn ranks(self, ranks: usize) -> Self {
        Self { ranks, ..self }
    }

    /// Sets the dtypes of parameters; the first one is that of set-ups that do not name one.
    pub fn dtypes(self, dtypes: &[DType]) -> Self {
        Self { dtypes: dtypes.to_vec(), ..self }
    }

    /// Sets into how many backward passes each rank may cut its rows, 1 to 3 by default. Leave only 1 for a model with
    /// statistics of a whole batch, such as batch norm.
    pub fn passes(self, passes: &[usize]) -> Self {
        Self { passes: passes.to_vec(), ..self }
    }

    /// Sets the schedules of a pipeline.
    pub fn schedules(self, schedules: &[ScheduleKind]) -> Self {
        Self { schedules: schedules.to_vec(), ..self }
    }

    /// Sets the seed of fresh parameters and dropout.
    pub fn seed(mut self, seed: u64) -> Self {
        self.subject.seed = seed;
        self
    }

    /// Sets the optimizer; an AdamW by default, with master weights for parameters of 16 bits.
    ///
    /// Each rank calls `make` with the parameters that it holds: those of its stages, in a pipeline.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_prove::prove;
    /// use candle_shard::DTensor;
    /// use candle_shard::nn::{Linear, Mode, ParamsSgd, Sgd, MeshVarBuilder};
    ///
    /// let model = |vb: &MeshVarBuilder| {
    ///     let layer = Linear::new(4, 2, true, &vb.pp("layer"))?;
    ///     Ok(move |xs: &[DTensor], _: Mode| layer.forward(&xs[0])?.sqr()?.mean_all())
    /// };
    /// let report = prove(model)
    ///     .input("x", &Tensor::ones((4, 4), candle_core::DType::F64, &Device::Cpu)?)
    ///     .optimizer(|of| {
    ///         let options = ParamsSgd { lr: 0.1, momentum: 0.9, ..ParamsSgd::default() };
    ///         Ok(Box::new(Sgd::new(of, options)?))
    ///     })
    ///     .only("dp=2 f64")
    ///     .run();
    /// report.assert();
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn optimizer(
        mut self,
        make: impl Fn(&Parameters) -> candle_shard::Result<Box<dyn Optimizer>> + Send + Sync + 'static,
    ) -> Self {
        self.subject.optimizer = Some(Box::new(make));
        self
    }

    /// Sets the number of training steps before a checkpoint; two by default.
    pub fn steps(mut self, steps: u64) -> Self {
        self.subject.steps = steps;
        self
    }

    /// Averages the gradients of replicas of a pipeline by a `DataParallel` behind each step, with
    /// [`Runtime::beside`](candle_pipe::Runtime::beside), instead of within it. Its loss is a mean or counts.
    pub fn beside(mut self) -> Self {
        self.subject.is_beside = true;
        self
    }

    /// Runs all but the last backward pass of a step with [`no_sync`](candle_shard::fsdp::no_sync).
    pub fn no_sync(mut self) -> Self {
        self.subject.is_unsynced = true;
        self
    }

    /// Sets how long one set-up may take; a minute by default.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Proves every combination of mesh, dtype, batch and cut, instead of every mesh with some of the others.
    pub fn exhaustive(self) -> Self {
        Self { exhaustive: true, ..self }
    }

    /// Proves only the set-up that this text describes, as a report printed it, and those of other calls of this method.
    pub fn only(mut self, setup: &str) -> Self {
        self.only.push(setup.to_string());
        self
    }

    /// Sets how fully sharded units work, where the axis `fsdp` has ranks. A set-up sets the dtype.
    pub fn unit_options(mut self, options: FullyShardOptions) -> Self {
        self.subject.unit_options = options;
        self
    }

    /// Also trains with a fault at some calls of each rank, `most` of each: all ranks must end with it.
    pub fn faults(self, most: usize) -> Self {
        Self { faults: most, ..self }
    }

    /// Compares the communication of one training step in these set-ups with the text file `path`, or writes the file if
    /// there is none.
    ///
    /// Set-ups are texts as [`only`](Self::only) takes them. Their worlds are simulated, so they may have any number of
    /// ranks. The file has the calls and bytes of rank 0 by source line. `CANDLE_PROVE_BUDGET=write` in the environment
    /// writes it again.
    ///
    /// # Errors
    /// A text with each line whose calls or bytes have changed. Lines may move within their file.
    ///
    /// # Panics
    /// If a set-up cannot be read, or there is no input with rows.
    pub fn budget(mut self, path: impl AsRef<Path>, setups: &[&str]) -> Result<(), String> {
        self.add_plan();
        let plain = self.plain();
        let read =
            |text: &&str| Setup::read(text, &plain).unwrap_or_else(|why| panic!("Proof::budget: {why}"));
        let setups: Vec<Setup> = setups.iter().map(read).collect();
        budget::check(&self.subject, &setups, path.as_ref())
    }

    /// Adds a plan that cuts nothing if there is none.
    fn add_plan(&mut self) {
        if self.subject.plans.is_empty() {
            self.subject.plans.push(Plan::none());
        }
    }

    /// Runs the proof.
    ///
    /// # Panics
    /// If the text of [`only`](Self::only) cannot be read, or there is no input with rows.
    pub fn run(mut self) -> Report {
        self.add_plan();
        let plain = self.plain();
        let setups = match &self.only[..] {
            [] => setups::all(&plain, &self),
            only => {
                let read = |text: &String| {
                    Setup::read(text, &plain).unwrap_or_else(|why| panic!("Proof::only: {why}"))
                };
                only.iter().map(read).collect()
            }
        };
        let compared = Comparison::new(Arc::new(self.subject), self.deadline);
        report::of(&compared, &setups, self.faults)
    }

    /// Returns the run on one device.
    fn plain(&self) -> Setup {
        let batch = self.subject.inputs.iter().find_map(ModelInput::len);
        let batch =
            batch.unwrap_or_else(|| panic!("a proof needs an input with rows: add one with Proof::input"));
        let is_graph = matches!(self.subject.program, ModelProgram::Graph(_) | ModelProgram::PlainGraph(_));
        Setup {
            axes: self.axes.iter().map(|axis| (axis.clone(), 1)).collect(),
            dtype: self.dtypes.first().copied().unwrap_or(DType::F64),
            compute: None,
            batch,
            second: None,
            passes: 1,
            plan: 0,
            strict: false,
            schedule: is_graph.then_some((FIRST, 1, KEEP)),
            resume: None,
            rounded: None,
        }
    }
}
