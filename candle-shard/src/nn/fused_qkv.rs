//! Query, key and value projections with one weight tensor.
use super::linear::init;
use super::lora::LinearAdapters;
use crate::layout::{Placement, Replicate, RowsOf, Shard, StoredName};
use crate::nn::{MeshVarBuilder, Width};
use crate::parallel::{LayerKind, ModuleStyle, ParamPlacements};
use crate::redistribute::Target;
use crate::rules::{self, OpSpec};
use crate::{DTensor, Error, Result, kernels};
use candle_dist::backend::Dims;
use candle_dist::empty;
use smallvec::{SmallVec, smallvec};

/// The heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// The number of query heads.
    pub query: usize,
    /// The number of key heads and of value heads. Each serves a group of consecutive query heads.
    pub key_value: usize,
    /// The width of a head.
    pub dim: usize,
}

impl Heads {
    /// Returns the width of all query heads, in units in which `ranks` ranks may have them: each a multiple of
    /// `granule` columns, if the heads allow that.
    pub(super) fn width(
        self,
        ranks: usize,
        granule: usize,
        style: &ModuleStyle,
        vb: &MeshVarBuilder,
    ) -> Result<Width> {
        let Self { query, key_value, dim } = self;
        if query == 0 || dim == 0 || key_value == 0 || !query.is_multiple_of(key_value) {
            return Err(style.error(format_args!(
                "has {query} query heads and {key_value} key heads of {dim} on axis {:?} of {ranks} ranks; expected positive \
                 numbers, and query heads a multiple of the key heads",
                vb.mesh().names()[style.axis]
            )));
        }
        let together = self.together(ranks, granule);
        Ok(Width::new(query / together, together * dim))
    }

    /// Returns how many query heads stay together on one of `ranks` ranks, whose columns then are a multiple of `granule`,
    /// if the heads allow that.
    pub fn together(self, ranks: usize, granule: usize) -> usize {
        let Self { query, key_value, dim } = self;
        // If every rank has a key head, the queries of a key head stay together with it.
        let least = if key_value >= ranks { (query / key_value.max(1)).max(1) } else { 1 };
        let fits = |heads: &usize| query.is_multiple_of(*heads) && (heads * dim).is_multiple_of(granule);
        (least..=query).step_by(least).find(fits).unwrap_or(least)
    }
}

/// Query, key and value projections with one weight `[q | k | v]`, stacked by rows as in many files, and a bias stacked
/// alike.
///
/// Under [`ColwiseParallel`](crate::parallel::ColwiseParallel) each rank has whole heads of each of the three, so
/// attention needs no communication, for any number of heads. If there are fewer key heads than ranks and a group is
/// cut, all ranks hold the weights of keys and values, and each uses the heads that its queries need.
/// [`Parameters::reduce`](crate::nn::Parameters::reduce) then sums the gradients.
///
/// The parameters are `weight.q`, `weight.k` and `weight.v` (and `bias.q`, ..), also in checkpoints. If the weights
/// lack these names, the parameters are read from the rows of `weight` (and `bias`). Fresh parameters equal those rows
/// of a fresh `weight`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::nn::{FusedQkv, Heads, Linear, MeshVarBuilder};
/// use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
/// use candle_shard::{AttentionMask, DTensor, Replicate, Result};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let plan = Plan::new("tp").with("qkv", ColwiseParallel::default()).with("out", RowwiseParallel::default());
///     let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &Device::Cpu)?;
///     let heads = Heads { query: 6, key_value: 3, dim: 4 };
///     let qkv = FusedQkv::new(8, heads, true, &vb.pp("qkv"))?;
///     let out = Linear::new(qkv.width(), 8, false, &vb.pp("out"))?;
///     vb.finish()?;
///     let x = DTensor::distribute(&Tensor::ones((1, 5, 8), DType::F32, &Device::Cpu)?, &mesh, &[Replicate])?;
///     let [q, k, v] = qkv.forward(&x)?;
///     let mixed = q.scaled_dot_product_attention(&k, &v, AttentionMask::Causal, None)?;
///     let y = out.forward(&mixed.transpose(1, 2)?.flatten_from(2)?)?; // the only communication
///     assert_eq!(y.dims(), [1, 5, 8]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone)]
pub struct FusedQkv {
    heads: Heads,
    width: Width,
    /// Of queries, of keys, and of values, unless these are the keys.
    projections: SmallVec<[QkvProjection; 3]>,
    /// The number of ranks over which groups of queries are cut, if they are.
    shared_by: Option<usize>,
    style: ModuleStyle,
}

#[derive(Debug, Clone)]
struct QkvProjection {
    weight: DTensor,
    bias: Option<DTensor>,
    adapters: LinearAdapters,
}

impl FusedQkv {
    /// Builds a layer at the builder's path for `[batch, sequence, in_dim]`.
    ///
    /// # Errors
    /// If a number of heads or their width is 0, the key heads do not divide the query heads, or the plan does not
    /// shard the layer by columns.
    pub fn new(in_dim: usize, heads: Heads, bias: bool, vb: &MeshVarBuilder) -> Result<Self> {
        let stored = |parameter: &str, projection: usize, within: [usize; 2]| {
            let [rows, start] = within;
            let name = format!("{parameter}.{}", ["q", "k", "v"][projection]);
            StoredName { name, within: Some(RowsOf { of: parameter.into(), rows, start }) }
        };
        vb.refuse_adapters("its projections have no layers of their own")?;
        Self::build(in_dim, (heads, 1), bias, vb, stored, None)
    }

    /// Like [`new`](Self::new), with the parameters of three layers of these names: `q_proj.weight` and so on, as in
    /// Llama's files. Ranks have multiples of `granule` columns of queries, if whole heads end there. Where keys and values have one name,
    /// they have one layer, and values are what keys are.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_names(
        in_dim: usize,
        heads: Heads,
        granule: usize,
        bias: bool,
        names: [&str; 3],
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let stored = |parameter: &str, projection: usize, _| StoredName {
            name: format!("{}.{parameter}", names[projection]),
            within: None,
        };
        Self::build(in_dim, (heads, granule), bias, vb, stored, Some(names))
    }

    /// Builds a layer. `stored` returns where the parameter is stored, of a name (`weight` or `bias`) and projection; it also gets the
    /// number of rows of all three, and of those before this one.
    fn build(
        in_dim: usize,
        (heads, granule): (Heads, usize),
        bias: bool,
        vb: &MeshVarBuilder,
        stored: impl Fn(&str, usize, [usize; 2]) -> StoredName,
        names: Option<[&str; 3]>,
    ) -> Result<Self> {
        let style = vb.style();
        let Heads { query, key_value, dim } = heads;
        let ParamPlacements { weight: at, .. } = style.layout(LayerKind::FusedQkv)?;
        let ranks = if at == Replicate { 1 } else { vb.mesh().shape()[style.axis] };
        let width = heads.width(ranks, granule, &style, vb)?;
        let group = query / key_value;
        let keys = Width::new(key_value, dim);
        let sizes = style.cut(width, ranks);
        // The keys of each rank are those of its queries.
        let shared = sizes.iter().zip(style.cut(keys, ranks)).any(|(&queries, keys)| queries != keys * group);
        let rows = width.size() + 2 * keys.size();
        let projection = |i: usize, start: usize, width: Width| {
            let whole = shared && i > 0;
            let at = if whole { Replicate } else { at };
            let weight = vb.part(
                &[width, in_dim.into()],
                stored("weight", i, [rows, start]),
                init(in_dim),
                at,
                whole,
            )?;
            let bias =
                bias.then(|| vb.part(&[width], stored("bias", i, [rows, start]), init(in_dim), at, whole));
            let (dims, of) = ([width, in_dim.into()], names.map(|names| vb.pp(names[i])));
            let adapters = match of {
                None => LinearAdapters::default(),
                Some(vb) if whole => LinearAdapters::used_unlike(dims, &vb)?,
                Some(vb) => LinearAdapters::new(dims, at, &vb)?,
            };
            Ok::<_, Error>(QkvProjection { weight, bias: bias.transpose()?, adapters })
        };
        let mut projections: SmallVec<[QkvProjection; 3]> =
            smallvec![projection(0, 0, width)?, projection(1, width.size(), keys)?];
        if names.is_none_or(|[_, key, value]| key != value) {
            projections.push(projection(2, width.size() + keys.size(), keys)?);
        }
        Ok(Self { heads, width, projections, shared_by: shared.then_some(ranks), style })
    }

    /// Returns query `[batch, heads, sequence, dim]`, key and value of `x` `[batch, sequence, in_dim]`.
    ///
    /// Key and value have the key heads, or, if ranks share key heads, a copy for each query head.
    #[track_caller]
    pub fn forward(&self, x: &DTensor) -> Result<[DTensor; 3]> {
        self.style.layer(|| {
            if x.rank() != 3 {
                return Err(self
                    .style
                    .error(format_args!("gets {}; expected [batch, sequence, width]", x.spec())));
            }
            let [x] = self.style.inputs([x])?;
            let shared = |p: &QkvProjection| match self.shared_by {
                Some(ranks) => self.project_shared(&x, p, ranks),
                None => p.project(&x),
            };
            let heads = |y: DTensor| {
                let [y] = self.style.outputs([&y])?;
                y.split_units(2, self.heads.dim)?.transpose(1, 2)
            };
            let [q, k, others @ ..] = &self.projections[..] else {
                return Err(self.style.error("has no projections of queries and keys"));
            };
            let (q, k) = (heads(q.project(&x)?)?, heads(shared(k)?)?);
            let v = others.first().map_or(Ok(k.clone()), |v| heads(shared(v)?))?;
            Ok([q, k, v])
        })
    }

    /// Returns the width of all query heads, sharded like them: the input width of the output projection.
    pub fn width(&self) -> Width {
        self.width
    }

    /// Returns the weights `[q | k | v]` in one tensor, as in files of other programs.
    pub fn fused_weight(&self) -> Result<DTensor> {
        let weights: SmallVec<[&DTensor; 3]> = self.projections.iter().map(|p| &p.weight).collect();
        DTensor::cat(&weights, 0)
    }

    /// Returns the biases `[q | k | v]` in one tensor, if there are biases.
    pub fn fused_bias(&self) -> Result<Option<DTensor>> {
        let biases: Option<Vec<&DTensor>> = self.projections.iter().map(|p| p.bias.as_ref()).collect();
        biases.map(|biases| DTensor::cat(&biases, 0)).transpose()
    }

    /// Projects `x` by weights that all ranks hold.
    fn project_shared(&self, x: &DTensor, projection: &QkvProjection, ranks: usize) -> Result<DTensor> {
        let QkvProjection { weight, bias, adapters } = projection;
        let sizes = self.style.cut(self.width, ranks);
        let shared = SharedHeads { heads: self.heads, axis: self.style.axis, sizes };
        let y = shared.project(x, weight, bias.as_ref())?;
        adapters.add_by(y, x, &|x, weight, bias| shared.project(x, weight, bias))
    }
}

impl QkvProjection {
    fn project(&self, x: &DTensor) -> Result<DTensor> {
        self.adapters.linear(x, &self.weight, self.bias.as_ref())
    }
}

/// Key heads that ranks have in common: each uses those that its query heads need.
pub(super) struct SharedHeads {
    pub(super) heads: Heads,
    /// The axis of the query heads, and their columns on each rank.
    pub(super) axis: usize,
    pub(super) sizes: Dims,
}

impl SharedHeads {
    /// Projects `x` by a weight that all ranks hold, and returns a copy of the key heads for each query head, sharded like the query.
    pub(super) fn project(&self, x: &DTensor, weight: &DTensor, bias: Option<&DTensor>) -> Result<DTensor> {
        let Self { heads: Heads { query, key_value, dim }, axis, ref sizes } = *self;
        let group = query / key_value;
        let inputs: SmallVec<[&DTensor; 3]> = [x, weight].into_iter().chain(bias).collect();
        let op_spec = || {
            rules::check_meshes("project_shared", &inputs)?;
            let rows = |placement: Placement| matches!(placement, Shard(0 | 1));
            let mut out = x.targets();
            for (a, target) in
                out.iter_mut().enumerate().filter(|(a, target)| *a == axis || !rows(target.placement))
            {
                *target = if a == axis { Target::shard(2, sizes) } else { Replicate.into() };
            }
            let mut input = out.clone();
            input[axis] = Replicate.into();
            let whole = out.iter().map(|_| Target::from(Replicate)).collect();
            let targets = [input].into_iter().chain(vec![whole; inputs.len() - 1]);
            let shape = Dims::from_slice(&[x.dims()[0], x.dims()[1], query * dim]);
            OpSpec::laid(&inputs, targets, &out, &[(shape, x.dtype())])
        };
        let fixed = [axis, query, key_value, dim];
        let attributes: Dims = fixed.into_iter().chain(sizes.iter().copied()).collect();
        let mut made = rules::run_with("project_shared", &attributes, &inputs, &op_spec, &|x, out| {
            let held = &out[0].local_block()[2];
            let heads = held.start / dim..held.end / dim;
            let keys = heads.start / group..heads.end.div_ceil(group);
            let rows = |t: &DTensor| t.to_local().narrow(0, keys.start * dim, keys.len() * dim);
            let bias = x.get(2).map(rows).transpose()?;
            let y = kernels::linear(x[0].to_local(), &rows(&x[1])?, bias.as_ref())?;
            let (batch, seq, _) = y.dims3()?;
            let copies: Vec<u32> = heads.map(|head| (head / group - keys.start) as u32).collect();
            let y = empty::index_select(&y.reshape((batch, seq, keys.len(), dim))?, &copies, 2)?;
            Ok(smallvec![y.reshape((batch, seq, held.len()))?])
        })?;
        Ok(made.remove(0))
    }
}
