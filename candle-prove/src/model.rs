//! What can be proved: layers, graphs of pipelines, functions.
use candle_core::Tensor;
use candle_nn::VarBuilder;
use candle_pipe::PipeBuilder;
use candle_shard::nn::{MeshVarBuilder, Mode, Optimizer, Parameters};
use candle_shard::{DTensor, Result};

/// The mean loss of a batch, from its inputs in the order of their declaration.
pub(super) type LossFn = Box<dyn Fn(&[DTensor], Mode) -> Result<DTensor>>;

/// Builds the layers of a model.
type Build = Box<dyn Fn(&MeshVarBuilder) -> Result<LossFn> + Send + Sync>;

/// Declares a pipeline.
type Declare = Box<dyn Fn() -> PipeBuilder<MeshVarBuilder> + Send + Sync>;

/// Declares a pipeline of plain tensors.
type DeclarePlain = Box<dyn Fn() -> PipeBuilder<VarBuilder<'static>> + Send + Sync>;

/// Computes a loss from float inputs that get gradients.
type LossCompute = Box<dyn Fn(&[DTensor]) -> Result<DTensor> + Send + Sync>;

/// Makes the optimizer of the parameters that a rank holds.
pub(super) type MakeOptimizer = Box<dyn Fn(&Parameters) -> Result<Box<dyn Optimizer>> + Send + Sync>;

/// A model in the form in which the prover runs it.
pub(super) enum ModelProgram {
    Layers(Build),
    Graph(Declare),
    PlainGraph(DeclarePlain),
    Function(LossCompute),
}

/// A model that [`prove`](crate::prove()) takes. These closures are models; their kinds only tell them apart:
///
/// | closure | model |
/// |---|---|
/// | `Fn(&MeshVarBuilder) -> Result<impl Fn(&[DTensor], Mode) -> Result<DTensor>>` | builds layers, and returns the loss of a batch as a function of its inputs |
/// | `Fn() -> PipeBuilder<MeshVarBuilder>` | declares a pipeline with a loss; its inputs have the names of the proof's |
/// | `Fn() -> PipeBuilder<VarBuilder>` | the same, of plain tensors: candle's layers |
/// | `Fn(&[DTensor]) -> Result<DTensor>` | a loss without parameters; float inputs get gradients |
pub trait Model<Kind> {
    #[doc(hidden)]
    #[allow(private_interfaces)] // only the prover calls it
    fn program(self) -> ModelProgram;
}

/// The kind of models that build layers.
#[derive(Debug)]
pub struct LayersKind;

/// The former name of [`LayersKind`].
#[deprecated(since = "0.1.0", note = "renamed to LayersKind")]
pub type Layers = LayersKind;

/// The kind of models that declare a pipeline.
#[derive(Debug)]
pub struct GraphKind;

/// The former name of [`GraphKind`].
#[deprecated(since = "0.1.0", note = "renamed to GraphKind")]
pub type Graph = GraphKind;

/// The kind of models that declare a pipeline of plain tensors.
#[derive(Debug)]
pub struct PlainGraphKind;

/// The former name of [`PlainGraphKind`].
#[deprecated(since = "0.1.0", note = "renamed to PlainGraphKind")]
pub type PlainGraph = PlainGraphKind;

/// The kind of models without parameters.
#[derive(Debug)]
pub struct FunctionKind;

/// The former name of [`FunctionKind`].
#[deprecated(since = "0.1.0", note = "renamed to FunctionKind")]
pub type Function = FunctionKind;

impl<B, F> Model<LayersKind> for B
where
    B: Fn(&MeshVarBuilder) -> Result<F> + Send + Sync + 'static,
    F: Fn(&[DTensor], Mode) -> Result<DTensor> + 'static,
{
    #[allow(private_interfaces)]
    fn program(self) -> ModelProgram {
        ModelProgram::Layers(Box::new(move |vb| Ok(Box::new(self(vb)?))))
    }
}

impl<D> Model<GraphKind> for D
where
    D: Fn() -> PipeBuilder<MeshVarBuilder> + Send + Sync + 'static,
{
    #[allow(private_interfaces)]
    fn program(self) -> ModelProgram {
        ModelProgram::Graph(Box::new(self))
    }
}

impl<D> Model<PlainGraphKind> for D
where
    D: Fn() -> PipeBuilder<VarBuilder<'static>> + Send + Sync + 'static,
{
    #[allow(private_interfaces)]
    fn program(self) -> ModelProgram {
        ModelProgram::PlainGraph(Box::new(self))
    }
}

impl<F> Model<FunctionKind> for F
where
    F: Fn(&[DTensor]) -> Result<DTensor> + Send + Sync + 'static,
{
    #[allow(private_interfaces)]
    fn program(self) -> ModelProgram {
        ModelProgram::Function(Box::new(self))
    }
}

/// An input of a model: its name, the whole tensor, and the dims that are cut.
#[derive(Debug, Clone)]
pub struct ModelInput {
    pub(super) name: String,
    pub(super) whole: Tensor,
    pub(super) rows: Option<usize>,
    pub(super) tokens: Option<usize>,
}

/// The former name of [`ModelInput`].
#[deprecated(since = "0.1.0", note = "renamed to ModelInput")]
pub type Input = ModelInput;

impl ModelInput {
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
