//! The builder of parameters: fresh or loaded, sharded as the plan says.
mod complete;
mod made;
mod parameter;

use self::complete::BuildStatus;
use super::adapter::AdapterSet;
use super::moved::StateDict;
use super::source::ParameterSource;
use crate::files::weights::TensorPlace;
use crate::fsdp::{Sharder, Unit};
use crate::kernels::QuantizedMatrix;
use crate::nn::{Parameter, Parameters, Width};
use crate::parallel::{LayerKind, ModuleStyle, Plan, Shares};
use crate::tensor::VarRegistry;
use crate::{DTensor, Result, Weights};
use candle_core::{DType, Device, Tensor};
use candle_dist::backend::Dims;
use candle_dist::{DeviceMesh, ProcessGroup};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The place of a tensor in files, and the rows and columns of it.
pub(super) type BlockKey = (TensorPlace, Range<usize>, Range<usize>);

/// What is held of places of files, of which a builder may have [several](MeshVarBuilder::with_weights).
type HeldBlocks<T> = HashMap<(usize, BlockKey), T>;

/// What tells some full names of parameters from others.
type NamePredicate = dyn Fn(&str) -> bool + Send + Sync;

struct BuilderState {
    source: Arc<ParameterSource>,
    seed: u64,
    mesh: DeviceMesh,
    plan: Plan,
    dtype: DType,
    device: Device,
    built: Mutex<Vec<Parameter>>,
    registry: Arc<VarRegistry>,
    /// The quantized weights that are held, and the bytes of those that ranks hold together.
    matrices: Mutex<HeldBlocks<QuantizedMatrix>>,
    pieces: Mutex<HeldBlocks<Tensor>>,
    /// The bytes of quantized weights, which are no parameters.
    quantized_bytes: AtomicUsize,
    /// The elements of parameters that only have an outline.
    outlined: AtomicUsize,
    /// The entries of the plan that matched a module.
    matched: Mutex<BTreeSet<usize>>,
    /// How many parts of the model have files of their own.
    files: AtomicUsize,
    completion: BuildStatus,
}

/// Creates the parameters of layers, on each rank only its shard: candle's `VarBuilder` for a mesh and a plan.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::{Linear, MeshVarBuilder};
/// use candle_shard::parallel::{ColwiseParallel, Plan};
/// use candle_shard::{DTensor, Replicate, Result};
///
/// let shapes = World::threads(2).run(|ctx| -> Result<Vec<usize>> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plan = Plan::new("tp").with("up", ColwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
///     let layer = Linear::new(4, 6, true, &vb.pp("up"))?;
///     let parameters = vb.finish()?; // an error if a pattern of the plan matched nothing
///     let x = DTensor::distribute(&Tensor::ones((1, 4), DType::F32, &Device::Cpu)?, &mesh, &[Replicate])?;
///     assert_eq!(layer.forward(&x)?.dims(), [1, 6]);
///     Ok(parameters.vars()[0].dims().to_vec())
/// })?;
/// assert_eq!(shapes, [[3, 4], [3, 4]]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Clone)]
pub struct MeshVarBuilder {
    shared: Arc<BuilderState>,
    pub(super) path: Vec<String>,
    /// Whether layers get parameters without gradients.
    pub(super) frozen: bool,
    /// Whether those of a full name do.
    frozen_names: Option<Arc<NamePredicate>>,
    /// The adapters of the model.
    pub(super) adapters: Option<Arc<AdapterSet>>,
    /// The adapter whose parameters this builds.
    pub(super) adapter: Option<usize>,
    /// Factors of adapters that several layers of this model have in common, by name.
    pub(super) shared_factors: Arc<Mutex<HashMap<String, DTensor>>>,
    /// The files of this part of the model, if it has some of its own, with their number.
    files: Option<(usize, Arc<Weights>)>,
    /// The shares in which layers are cut, if not in those of the plan.
    shares: Option<Shares>,
    /// Whether quantized parameters are read as floats.
    dequantized: bool,
    /// Whether parameters are zeros that take no memory.
    is_outline: bool,
    /// Shards the parameters of units beyond the plan.
    pub(super) sharder: Option<Arc<Sharder>>,
    /// The unit that is being built.
    pub(super) unit: Option<Arc<Unit>>,
    /// The names of the parameters that this model has requested.
    requested: Arc<Mutex<Vec<String>>>,
}

/// The former name of [`MeshVarBuilder`].
#[deprecated(since = "0.1.0", note = "renamed to MeshVarBuilder")]
pub type ShardedVarBuilder = MeshVarBuilder;

impl MeshVarBuilder {
    /// Creates a builder of parameters drawn from `seed`, bit-equal on every mesh.
    ///
    /// # Errors
    /// If the mesh has no axis of the plan's name.
    pub fn fresh(seed: u64, mesh: &DeviceMesh, plan: Plan, dtype: DType, device: &Device) -> Result<Self> {
        Self::new(ParameterSource::Fresh, seed, mesh, plan, dtype, device)
    }

    /// Creates a builder of parameters from a candle `VarBuilder`. Each rank keeps its shards; `seed` is for dropout.
    pub fn from_candle(
        vb: candle_nn::VarBuilder<'static>,
        seed: u64,
        mesh: &DeviceMesh,
        plan: Plan,
    ) -> Result<Self> {
        let (dtype, device) = (vb.dtype(), vb.device().clone());
        Self::new(ParameterSource::Loaded(vb, Default::default()), seed, mesh, plan, dtype, &device)
    }

    /// Creates a builder of parameters from files. Each rank reads only its shard, cast to `dtype`. `seed` is for
    /// dropout.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::nn::{Linear, MeshVarBuilder};
    /// use candle_shard::parallel::{ColwiseParallel, Plan};
    /// use candle_shard::{Result, Weights};
    ///
    /// let path = std::env::temp_dir().join(format!("from-weights-doc-{}.safetensors", std::process::id()));
    /// Tensor::ones((6, 4), DType::F16, &Device::Cpu)?.save_safetensors("up.weight", &path)?;
    /// let read = World::threads(2).run(|ctx| -> Result<u64> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let plan = Plan::new("tp").with("up", ColwiseParallel::default());
    ///     let weights = std::sync::Arc::new(Weights::open(&path)?);
    ///     let vb = MeshVarBuilder::from_weights(weights.clone(), 0, &mesh, plan, DType::F32, &Device::Cpu)?;
    ///     Linear::new(4, 6, false, &vb.pp("up"))?;
    ///     Ok(weights.bytes_read())
    /// })?;
    /// assert_eq!(read, [3 * 4 * 2, 3 * 4 * 2]); // half of the rows each
    /// std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the mesh has no axis of the plan's name. [`get`](Self::get) returns those of [`Weights::read`].
    pub fn from_weights(
        weights: impl Into<Arc<Weights>>,
        seed: u64,
        mesh: &DeviceMesh,
        plan: Plan,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Self::new(ParameterSource::Stored(weights.into()), seed, mesh, plan, dtype, device)
    }

    /// Creates a builder of parameters from an existing model: its tensors by name, equal on every rank. `seed` is for
    /// dropout.
    ///
    /// A rank keeps a copy of its shard, cast to `dtype` on `device`, and drops the tensor as soon as its parameter is
    /// built. So at most one tensor is in memory twice, if nothing else holds them. Nothing is communicated:
    /// [`finish`](Self::finish) compares the first elements of each tensor, and [`compare_operands`](crate::compare_operands) all of
    /// them. See [`parallel`](crate::parallel).
    ///
    /// # Errors
    /// If the mesh has no axis of the plan's name. [`get`](Self::get) refuses a parameter that the model lacks, or has
    /// in another shape, and [`finish`](Self::finish) refuses tensors that no layer used.
    pub fn parallelize(
        tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>,
        seed: u64,
        mesh: &DeviceMesh,
        plan: Plan,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let source = ParameterSource::Moved(StateDict::new(tensors), Default::default());
        Self::new(source, seed, mesh, plan, dtype, device)
    }

    fn new(
        source: ParameterSource,
        seed: u64,
        mesh: &DeviceMesh,
        plan: Plan,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        plan.check(mesh)?;
        let (built, matched, quantized_bytes) = (Mutex::default(), Mutex::default(), AtomicUsize::new(0));
        let shared = BuilderState {
            source: Arc::new(source),
            seed,
            mesh: mesh.clone(),
            plan,
            dtype,
            device: device.clone(),
            built,
            registry: VarRegistry::new(),
            quantized_bytes,
            outlined: AtomicUsize::new(0),
            matrices: Mutex::default(),
            pieces: Mutex::default(),
            matched,
            files: AtomicUsize::new(0),
            completion: BuildStatus::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            path: Vec::new(),
            frozen: false,
            frozen_names: None,
            adapters: None,
            adapter: None,
            shared_factors: Arc::default(),
            files: None,
            shares: None,
            dequantized: false,
            is_outline: false,
            sharder: None,
            unit: None,
            requested: Arc::default(),
        })
    }

    /// Returns a builder whose parameters get no gradients: for inference, which then keeps no activations, and for the
    /// parts of a model that are not trained. To train them later, build the model [again](Self::again).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::nn::{Linear, MeshVarBuilder};
    /// use candle_shard::parallel::Plan;
    /// use candle_shard::{DTensor, Replicate, Result};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let vb = MeshVarBuilder::fresh(42, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
    ///     let (base, head) = (vb.frozen().pp("base"), vb.pp("head"));
    ///     let (base, head) = (Linear::new(4, 4, true, &base)?, Linear::new(4, 1, true, &head)?);
    ///     let x = DTensor::distribute(&Tensor::ones((1, 4), DType::F32, &Device::Cpu)?, &mesh, &[Replicate])?;
    ///     let grads = head.forward(&base.forward(&x)?)?.sum_all()?.backward()?;
    ///     let trained = vb.finish()?.iter().filter(|parameter| grads.get(&parameter.var).is_some()).count();
    ///     assert_eq!(trained, 2); // the head's weight and bias
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn frozen(&self) -> Self {
        Self { frozen: true, ..self.clone() }
    }

    /// Returns a builder whose parameters get no gradients if `is_frozen` says so of their full names, like those of a
    /// [frozen](Self::frozen) one.
    pub fn frozen_where(&self, is_frozen: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self { frozen_names: Some(Arc::new(is_frozen)), ..self.clone() }
    }

    /// Returns a builder for which no parameter is [quantized](Self::quantized_block): all are held as floats.
    pub fn dequantized(&self) -> Self {
        Self { dequantized: true, ..self.clone() }
    }

    /// Returns a builder whose layers are cut in these shares of the ranks of the plan's axis, instead of those of the
    /// [plan](Plan::with_shares): for example to [make up](Shares::beside) for heads that do not divide.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::Result;
    /// use candle_shard::nn::{Linear, MeshVarBuilder};
    /// use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, Shares};
    ///
    /// let rows = World::threads(2).run(|ctx| -> Result<usize> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let plan = Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default());
    ///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
    ///     let vb = vb.with_shares(Shares::new(&[1, 3])?)?;
    ///     let up = Linear::new(4, 8, false, &vb.pp("up"))?;
    ///     Linear::new(8, 4, false, &vb.pp("down"))?;
    ///     Ok(up.weight().to_local().dims()[0])
    /// })?;
    /// assert_eq!(rows, [2, 6]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If there are more or fewer shares than ranks.
    pub fn with_shares(&self, shares: Shares) -> Result<Self> {
        self.shared.plan.check_shares(Some(&shares), &self.shared.mesh)?;
        Ok(Self { shares: Some(shares), ..self.clone() })
    }

    /// Returns the shares in which layers are cut, if these are unlike.
    pub fn shares(&self) -> Option<&Shares> {
        self.shares.as_ref().or_else(|| self.shared.plan.shares())
    }

    /// Returns a builder whose parameters are zeros that take no memory and get no gradients, for which nothing is read: to find out what
    /// this rank [would hold](Self::outlined_elements). Weights that stay [quantized](Self::quantized_block) are read.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_dist::World;
    /// use candle_shard::Result;
    /// use candle_shard::nn::{Linear, MeshVarBuilder};
    /// use candle_shard::parallel::{ColwiseParallel, Plan};
    ///
    /// let held = World::threads(2).run(|ctx| -> Result<usize> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let plan = Plan::new("tp").with("up", ColwiseParallel::default());
    ///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?.outlined();
    ///     Linear::new(1 << 20, 1 << 20, true, &vb.pp("up"))?;
    ///     Ok(vb.outlined_elements())
    /// })?;
    /// assert_eq!(held, [(1 << 39) + (1 << 19); 2]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn outlined(&self) -> Self {
        Self { is_outline: true, ..self.clone() }
    }

    /// Returns how many elements this rank would hold of the parameters that were built as an [outline](Self::outlined).
    pub fn outlined_elements(&self) -> usize {
        self.shared.outlined.load(Ordering::Relaxed)
    }

    /// Returns the builder for the child module `name`, which may be a dotted path: `pp("a.b")` is `pp("a").pp("b")`.
    pub fn pp(&self, name: impl ToString) -> Self {
        let mut path = self.path.clone();
        // Patterns of a plan match the parts of a path one by one.
        path.extend(name.to_string().split('.').filter(|part| !part.is_empty()).map(str::to_string));
        Self { path, ..self.clone() }
    }

    /// Returns the seed of all random numbers.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Returns the dtype of the parameters.
    pub fn dtype(&self) -> DType {
        self.shared.dtype
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.shared.mesh
    }

    /// Returns the same builder for the parameters of a unit.
    pub(super) fn within(&self, sharder: Option<Arc<Sharder>>, unit: Option<Arc<Unit>>) -> Self {
        Self { sharder, unit, ..self.clone() }
    }

    /// Returns the plan.
    pub(super) fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// Returns the path of this module with `name` appended.
    pub fn full_name(&self, name: &str) -> String {
        self.path.iter().map(String::as_str).chain([name]).collect::<Vec<_>>().join(".")
    }

    /// Returns the plan's style for this module of other layers, which lays out its [inputs](ModuleStyle::inputs) and
    /// [outputs](ModuleStyle::outputs).
    ///
    /// # Errors
    /// If the plan gives it a style for layers with parameters.
    pub fn module_style(&self) -> Result<ModuleStyle> {
        let style = self.style();
        style.layout(LayerKind::Module)?;
        Ok(style)
    }

    /// Returns the plan's style for this layer.
    pub fn style(&self) -> ModuleStyle {
        let mut matched = self.shared.matched.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.plan.style_of(&self.path, (&self.shared.mesh, self.shares()), &mut matched)
    }

    /// Returns no style, for a layer at the builder's path that plans cannot cut.
    pub(crate) fn unstyled(&self) -> ModuleStyle {
        ModuleStyle::none(self.path.join("."))
    }

    /// Returns the sizes of the shards of a dim on the plan's axis.
    ///
    /// # Errors
    /// If the mesh has no such axis.
    pub fn shard_sizes(&self, width: impl Into<Width>) -> Result<Dims> {
        self.shared.plan.cut(width.into(), &self.shared.mesh, self.shares())
    }

    /// Returns the files that parameters are read from, if they are.
    pub(super) fn stored(&self) -> Option<&Arc<Weights>> {
        match (&self.files, &*self.shared.source) {
            (Some((_, weights)), _) | (None, ParameterSource::Stored(weights)) => Some(weights),
            _ => None,
        }
    }

    /// Returns the source of the model's own parameters.
    pub(super) fn own_source(&self) -> Arc<ParameterSource> {
        let own = self.files.as_ref().map(|(_, weights)| ParameterSource::Stored(weights.clone()));
        own.map_or_else(|| self.shared.source.clone(), Arc::new)
    }

    /// Returns the number of columns in a block of the parameter `name` of this module, if files store it quantized;
    /// `None` if its elements are stored one by one, do not come from files, or are [read as
    /// floats](Self::dequantized), and for blocks that are [no weights](crate::kernels::QuantizedMatrix::takes).
    ///
    /// Beside adapters that learn it is 1 for codes with scales of folders, such as FP8 and MXFP4, which may be cut anywhere.
    ///
    /// Layers like [`QuantizedLinear`](crate::nn::QuantizedLinear) keep such a parameter as it is stored; all other
    /// layers hold the floats that it stands for.
    pub fn quantized_block(&self, name: &str) -> Option<usize> {
        let name = self.full_name(name);
        // A module that is trained itself has floats.
        let is_trained = self.adapters.is_some() && !self.is_base(&name);
        let is_read = !self.dequantized && !is_trained;
        let weights = self.stored().filter(|_| is_read)?;
        if self.learns_adapters() && weights.has_codes(&name).ok()? {
            return Some(1);
        }
        let dtype = weights.quantized_dtype(&name).ok()??;
        QuantizedMatrix::takes(dtype).then(|| dtype.block_size())
    }

    /// Returns the bytes of the weights on this rank that stay quantized. They are no [parameters](Self::finish).
    pub fn quantized_bytes(&self) -> usize {
        self.shared.quantized_bytes.load(Ordering::Relaxed)
    }

    /// Returns the ranks over which the parameters of the unit that is being built are fully sharded.
    pub(super) fn sharded_over(&self) -> Option<&ProcessGroup> {
        self.sharder.as_ref().filter(|_| self.unit.is_some()).map(|sharder| sharder.group())
    }

    /// Returns the matrix of the rows and columns of a tensor at a place of the files, which is read once, under whatever names.
    pub(super) fn quantized_matrix(
        &self,
        key: BlockKey,
        read: impl FnOnce() -> Result<QuantizedMatrix>,
    ) -> Result<QuantizedMatrix> {
        self.held(|shared| &shared.matrices, key, QuantizedMatrix::bytes, read)
    }

    /// Returns the bytes of the rows and columns of a tensor at a place of the files, which are read once, under whatever names.
    pub(super) fn quantized_bytes_of(
        &self,
        key: BlockKey,
        read: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.held(|shared| &shared.pieces, key, Tensor::elem_count, read)
    }

    fn held<T: Clone>(
        &self,
        of: impl Fn(&BuilderState) -> &Mutex<HeldBlocks<T>>,
        key: BlockKey,
        bytes: impl Fn(&T) -> usize,
        read: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mut held = of(&self.shared).lock().unwrap_or_else(PoisonError::into_inner);
        let key = (self.files.as_ref().map_or(0, |(number, _)| *number), key);
        if let Some(known) = held.get(&key) {
            return Ok(known.clone());
        }
        let made = read()?;
        self.count_quantized(bytes(&made));
        held.insert(key, made.clone());
        Ok(made)
    }

    /// Counts bytes of quantized weights.
    pub(super) fn count_quantized(&self, bytes: usize) {
        self.shared.quantized_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the parameters that layers have requested of this builder since [`again`](Self::again), in their order.
    pub fn requested(&self) -> Parameters {
        let built = self.shared.built.lock().unwrap_or_else(PoisonError::into_inner);
        let requested = self.requested.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |name: &String| built.iter().find(|parameter| parameter.name == *name).cloned();
        Parameters::new(requested.iter().filter_map(of).collect())
    }

    /// Returns the parameters built so far, without the checks of [`finish`](Self::finish).
    pub fn built(&self) -> Parameters {
        Parameters::new(self.shared.built.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}
