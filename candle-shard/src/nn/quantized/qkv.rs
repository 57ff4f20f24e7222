//! Query, key and value projections by quantized weights.
use super::blocks::{WeightBlocks, absent};
use super::weight::QuantizedWeight;
use crate::layout::Replicate;
use crate::nn::fused_qkv::SharedHeads;
use crate::nn::lora::LinearAdapters;
use crate::nn::{Heads, Init, MeshVarBuilder, Width};
use crate::parallel::{LayerKind, ModuleStyle};
use crate::redistribute::Target;
use crate::rules::{self, OpSpec};
use crate::{DTensor, Error, Result};
use candle_dist::backend::Dims;
use candle_dist::empty;
use smallvec::{SmallVec, smallvec};

/// Query, key and value projections by three quantized weights: [`FusedQkv::with_names`](crate::nn::FusedQkv) for
/// weights that stay quantized.
///
/// Each rank has whole heads. If there are fewer key heads than ranks, or a group is cut, each rank reads the key and
/// value heads that its queries need, and returns a copy for each query head.
#[derive(Debug, Clone)]
pub struct QuantizedQkv {
    heads: Heads,
    width: Width,
    /// Of queries, of keys, and of values, unless these are the keys.
    projections: SmallVec<[QuantizedProjection; 3]>,
    style: ModuleStyle,
}

#[derive(Debug, Clone)]
struct QuantizedProjection {
    weight: QuantizedWeight,
    bias: Option<DTensor>,
    shared: Option<HeadSharing>,
    adapters: LinearAdapters,
}

impl QuantizedProjection {
    /// Finishes `y`, the product of `x` and the weight.
    fn finished(&self, y: &DTensor, x: &DTensor) -> Result<DTensor> {
        self.with_bias(self.weight.adapted(y, x, &self.adapters)?)
    }

    fn with_bias(&self, y: DTensor) -> Result<DTensor> {
        self.bias.as_ref().map_or(Ok(y.clone()), |bias| y.add(bias))
    }
}

/// How a rank uses key heads that it has in common with others.
#[derive(Debug, Clone)]
struct HeadSharing {
    /// The first key head that was read.
    first: usize,
    /// For each query head of this rank, the place of its key head among those that were read.
    copies: Vec<u32>,
}

impl QuantizedQkv {
    /// Builds a layer at the builder's path from the layers `names`, which are query, key and value.
    ///
    /// `granule` is the number of columns between which the output projection may be cut: its
    /// [block](MeshVarBuilder::quantized_block), or 1. If no whole heads end there, it is ignored. Where keys and values have one
    /// name, they have one layer, and values are what keys are.
    ///
    /// # Errors
    /// Those of [`FusedQkv::new`](crate::nn::FusedQkv::new) and of a [`QuantizedLinear`](super::QuantizedLinear).
    pub fn with_names(
        in_dim: usize,
        heads: Heads,
        granule: usize,
        bias: bool,
        names: [&str; 3],
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let style = vb.style();
        let (at, axis) = (style.layout(LayerKind::FusedQkv)?.weight, style.axis);
        let (ranks, rank) = match at {
            Replicate => (1, 0),
            _ => (vb.mesh().shape()[axis], vb.mesh().axis_group(axis)?.rank()),
        };
        let width = heads.width(ranks, granule, &style, vb)?;
        let Heads { query, key_value, dim } = heads;
        let (group, together) = (query / key_value, width.unit / dim);
        let in_groups = |piece: &usize| piece.is_multiple_of(group * dim);
        let is_simple = together.is_multiple_of(group) || group.is_multiple_of(together);
        let unit = (together / group).max(1);
        let keys = Width::new(key_value / unit, unit * dim);
        let sizes = style.cut(width, ranks);
        // The keys of each rank are those of its queries.
        let fit = || sizes.iter().zip(style.cut(keys, ranks)).all(|(&queries, keys)| queries == keys * group);
        let is_shared = !is_simple || !sizes.iter().all(in_groups) || !fit();
        let whole = |name: &str, rows: Width| {
            let vb = vb.pp(name);
            let weight = QuantizedWeight::read(&vb, "weight", [rows, in_dim.into()], at, axis)?;
            let bias =
                bias.then(|| vb.part(&[rows], "bias".into(), Init::Const(0.0), at, false)).transpose()?;
            let adapters = LinearAdapters::new([rows, in_dim.into()], at, &vb)?;
            Ok::<_, Error>(QuantizedProjection { weight, bias, shared: None, adapters })
        };
        let shared = |name: &str| {
            let vb = vb.pp(name);
            let start = sizes[..rank].iter().sum::<usize>() / dim;
            let queries = start..start + sizes[rank] / dim;
            let first = queries.start / group;
            let keys = first..if queries.is_empty() { first } else { queries.end.div_ceil(group) };
            let block = [keys.start * dim..keys.end * dim, 0..in_dim];
            let blocks = WeightBlocks::read(&vb, "weight", [key_value * dim, in_dim], block)?;
            let copies = queries.map(|head| (head / group - first) as u32).collect();
            let of_all =
                || vb.part(&[(key_value * dim).into()], "bias".into(), Init::Const(0.0), Replicate, true);
            let (dims, sizes, mesh) = ([width, in_dim.into()], sizes.clone(), vb.mesh().clone());
            let weight = QuantizedWeight { blocks, dims, sizes, at, axis, mesh };
            Ok::<_, Error>(QuantizedProjection {
                weight,
                bias: bias.then(of_all).transpose()?,
                shared: Some(HeadSharing { first, copies }),
                adapters: LinearAdapters::used_unlike([(key_value * dim).into(), in_dim.into()], &vb)?,
            })
        };
        let key = |name: &str| if is_shared { shared(name) } else { whole(name, keys) };
        let mut projections: SmallVec<[QuantizedProjection; 3]> =
            smallvec![whole(names[0], width)?, key(names[1])?];
        if names[1] != names[2] {
            projections.push(key(names[2])?);
        }
        Ok(Self { heads, width, projections, style })
    }

    /// Returns query `[batch, heads, sequence, dim]`, key and value of `x` `[batch, sequence, in_dim]`.
    ///
    /// Key and value have the key heads, or, if ranks share key heads, a copy for each query head.
    ///
    /// # Errors
    /// If `x` has another shape.
    #[track_caller]
    pub fn forward(&self, x: &DTensor) -> Result<[DTensor; 3]> {
        self.style.layer(|| {
            if x.rank() != 3 {
                return Err(self
                    .style
                    .error(format_args!("gets {}; want [batch, sequence, width]", x.spec())));
            }
            let [q, k, others @ ..] = &self.projections[..] else {
                return Err(self.style.error("has no projections of queries and keys"));
            };
            q.weight.check_mesh("quantized_qkv", x)?;
            let [x] = self.style.inputs([x])?;
            let heads = |y: DTensor| {
                let [y] = self.style.outputs([&y])?;
                y.split_units(2, self.heads.dim)?.transpose(1, 2)
            };
            let shared = |p: &QuantizedProjection| {
                p.shared.as_ref().map(|shared| self.project_shared(&x, p, shared)).transpose()
            };
            let [q, k, v] = match (shared(k)?, others.first()) {
                (Some(k), v) => {
                    let v = v.map(shared).transpose()?.flatten().unwrap_or_else(|| k.clone());
                    [q.finished(&q.weight.product(&x)?, &x)?, k, v]
                }
                (None, Some(v)) => {
                    let [of_q, of_k, of_v] =
                        QuantizedWeight::products([&q.weight, &k.weight, &v.weight], &x)?;
                    [q.finished(&of_q, &x)?, k.finished(&of_k, &x)?, v.finished(&of_v, &x)?]
                }
                (None, None) => {
                    let [of_q, of_k] = QuantizedWeight::products([&q.weight, &k.weight], &x)?;
                    let k = k.finished(&of_k, &x)?;
                    [q.finished(&of_q, &x)?, k.clone(), k]
                }
            };
            Ok([heads(q)?, heads(k)?, heads(v)?])
        })
    }

    /// The width of all query heads, sharded like them: the input width of the output projection.
    pub fn width(&self) -> Width {
        self.width
    }

    /// The bytes of the weights on this rank.
    pub fn bytes(&self) -> usize {
        self.projections.iter().map(|projection| projection.weight.blocks.bytes()).sum()
    }

    /// Returns a copy of the key heads for each query head, sharded like the query.
    fn project_shared(
        &self,
        x: &DTensor,
        projection: &QuantizedProjection,
        shared: &HeadSharing,
    ) -> Result<DTensor> {
        let QuantizedProjection { weight, bias, adapters, .. } = projection;
        let axis = weight.axis;
        let Heads { query, key_value, dim } = self.heads;
        let inputs: SmallVec<[&DTensor; 2]> = [x].into_iter().chain(bias).collect();
        let op_spec = || {
            let mut lay = x.targets();
            for (a, target) in lay.iter_mut().enumerate() {
                if a == axis || !matches!(target.placement.shard_dim(), Some(0 | 1)) {
                    *target = Replicate.into();
                }
            }
            let mut made = lay.clone();
            made[axis] = Target::shard(2, &weight.sizes);
            let whole = lay.iter().map(|_| Target::from(Replicate)).collect();
            let shape = Dims::from_slice(&[x.dims()[0], x.dims()[1], query * dim]);
            OpSpec::laid(
                &inputs,
                [lay].into_iter().chain(vec![whole; inputs.len() - 1]),
                &made,
                &[(shape, x.dtype())],
            )
        };
        let fixed = [axis, query, key_value, dim];
        let attributes: Dims = fixed.into_iter().chain(weight.sizes.iter().copied()).collect();
        let matrix = weight.blocks.matrix()?;
        let mut made =
            rules::run_with("project_shared_quantized", &attributes, &inputs, &op_spec, &|x, _| {
                let matrix = matrix.as_ref().ok_or_else(absent)?;
                let mut y = weight.blocks.product_by(matrix, x[0].to_local())?;
                let (batch, seq, held) = y.dims3()?;
                if let Some(bias) = x.get(1) {
                    y = y.broadcast_add(&bias.to_local().narrow(0, shared.first * dim, held)?)?;
                }
                let y = empty::index_select(&y.reshape((batch, seq, held / dim, dim))?, &shared.copies, 2)?;
                Ok(smallvec![y.reshape((batch, seq, shared.copies.len() * dim))?])
            })?;
        let y = made.remove(0);
        let heads = SharedHeads { heads: self.heads, axis, sizes: weight.sizes.clone() };
        adapters.add_by(y, x, &|x, weight, bias| heads.project(x, weight, bias))
    }
}
