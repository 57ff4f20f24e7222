//! What can be proved: layers, graphs of pipelines, functions.
use candle_core::Tensor;
use candle_nn::VarBuilder;
use candle_pipe::PipeBuilder;
use candle_shard::nn::{Mode, Optimizer, Parameters, ShardedVarBuilder};
use candle_shard::{DTensor, Result};

/// The mean loss of a batch, from its inputs in the order of their declaration.
pub(super) type LossFn = Box<dyn Fn(&[DTensor], Mode) -> Result<DTensor>>;

/// Builds the layers of a model.
type Build = Box<dyn Fn(&ShardedVarBuilder) -> Result<LossFn> + Send + Sync>;

/// Declares a pipeline.
type Declare = Box<dyn Fn() -> PipeBuilder<ShardedVarBuilder> + Send + Sync>;

/// Declares a pipeline of plain tensors.
type DeclarePlain = Box<dyn Fn() -> PipeBuilder<VarBuilder<'static>> + Send + Sync>;

/// Computes a loss from float inputs that get gradients.
type Compute = Box<dyn Fn(&[DTensor]) -> Result<DTensor> + Send + Sync>;

/// Makes the optimizer of the parameters that a rank holds.
pub(super) type MakeOptimizer = Box<dyn Fn(&Parameters) -> Result<Box<dyn Optimizer>> + Send + Sync>;

/// A model in the form in which the prover runs it.
pub(super) enum Program {
    Layers(Build),
    Graph(Declare),
    PlainGraph(DeclarePlain),
    Function(Compute),
}

/// A model that [`prove`](crate::prove()) takes. These closures are models; their kinds only tell them apart:
///
/// | closure | model |
/// |---|---|
/// | `Fn(&ShardedVarBuilder) -> Result<impl Fn(&[DTensor], Mode) -> Result<DTensor>>` | builds layers, and returns the loss of a batch as a function of its inputs |
/// | `Fn() -> PipeBuilder<ShardedVarBuilder>` | declares a pipeline with a loss; its inputs have the names of the proof's |
/// | `Fn() -> PipeBuilder<VarBuilder>` | the same, of plain tensors: candle's layers |
/// | `Fn(&[DTensor]) -> Result<DTensor>` | a loss without parameters; float inputs get gradients |
pub trait Model<Kind> {
    #[doc(hidden)]
    #[allow(private_interfaces)] // only the prover calls it
    fn program(self) -> Program;
}

/// The kind of models that build layers.
#[derive(Debug)]
pub struct Layers;

/// The kind of models that declare a pipeline.
#[derive(Debug)]
pub struct Graph;

/// The kind of models that declare a pipeline of plain tensors.
#[derive(Debug)]
pub struct PlainGraph;

/// The kind of models without parameters.
#[derive(Debug)]
pub struct Function;

impl<B, F> Model<Layers> for B
where
    B: Fn(&ShardedVarBuilder) -> Result<F> + Send + Sync + 'static,
    F: Fn(&[DTensor], Mode) -> Result<DTensor> + 'static,
{
    #[allow(private_interfaces)]
    fn program(self) -> Program {
        Program::Layers(Box::new(move |vb| Ok(Box::new(self(vb)?))))
    }
}

impl<D> Model<Graph> for D
where
    D: Fn() -> PipeBuilder<ShardedVarBuilder> + Send + Sync + 'static,
{
    #[allow(private_interfaces)]
    fn program(self) -> Program {
        Program::Graph(Box::new(self))
    }
}

impl<D> Model<PlainGraph> for D
where
    D: Fn() -> PipeBuilder<VarBuilder<'static>> + Send + Sync + 'static,
{
    #[allow(private_interfaces)]
    fn program(self) -> Program {
        Program::PlainGraph(Box::new(self))
    }
}

impl<F> Model<Function> for F
where
    F: Fn(&[DTensor]) -> Result<DTensor> + Send + Sync + 'static,
{
    #[allow(private_interfaces)]
    fn program(self) -> Program {
        Program::Function(Box::new(self))
    }
}

/// An input of a model: its name, the whole tensor, and the dims that are cut.
#[derive(Debug, Clone)]
pub struct Input {
    pub(super) name: String,
    pub(super) whole: Tensor,
    pub(super) rows: Option<usize>,
    pub(super) tokens: Option<usize>,
}

impl Input {
    /// Creates an input with a row of the batch at each index of dim 0.
    pub fn new(name: impl Into<String>, whole: &Tensor) -> Self {
        Self { name: name.into(), whole: whole.clone(), rows: Some(0), tokens: None }
    }

    /// Sets the dim of the rows; `None` for a tensor that is the same for all rows.
    pub fn rows(self, dim: impl Into<Option<usize>>) -> Self {
        Self { rows: dim.into(), ..self }
    }

    /// Sets the dim of the tokens, which the axis `cp` shards.
    pub fn tokens(self, dim: usize) -> Self {
        Self { tokens: Some(dim), ..self }
    }

    /// Returns the number of rows of the batch, if the input has rows.
    pub(super) fn len(&self) -> Option<usize> {
        self.rows.and_then(|dim| self.whole.dims().get(dim).copied())
    }
}
