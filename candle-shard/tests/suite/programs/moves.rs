//! Steps that move, choose and compare elements.
use super::{Program, Value, narrow};
use candle_core::{Device, Tensor};
use candle_shard::{DTensor, Reduction, Replicate, Result, Shard};
use itertools::Itertools;

/// The number of kinds of steps here.
pub(super) const KINDS: usize = 16;

impl Program {
    /// The result of the `kind`-th step on `x` and `y`, here and on one device, where their shapes fit it.
    pub(super) fn moved(
        &mut self,
        kind: usize,
        x: &Value,
        y: &Value,
        dim: usize,
    ) -> Result<Option<(&'static str, DTensor, Tensor)>> {
        let (a, b) = (x.here.dims().to_vec(), y.here.dims().to_vec());
        let Some(&size) = a.get(dim) else { return Ok(None) };
        let joins = a.len() == b.len() && (0..a.len()).all(|d| d == dim || a[d] == b[d]);
        let (at, dense) = (self.dice.below(size), x.plain.contiguous()?);
        let made = match kind {
            0 => ("narrow", x.here.narrow(dim, at, size - at)?, x.plain.narrow(dim, at, size - at)?),
            1 if joins => {
                let here = DTensor::cat(&[&x.here, &y.here, &x.here], dim)?;
                ("cat", here, Tensor::cat(&[&x.plain, &y.plain, &x.plain], dim)?)
            }
            2 => {
                let (left, right) = (self.dice.below(3), self.dice.below(3));
                let plain = x.plain.pad_with_zeros(dim, left, right)?;
                ("pad", x.here.pad_with_zeros(dim, left, right)?, plain)
            }
            3 => ("max", x.here.max_keepdim(dim)?, x.plain.max_keepdim(dim)?),
            4 => ("min", x.here.min(dim)?, x.plain.min(dim)?),
            5 if a == b => {
                let here = x.here.gt(&y.here)?.where_cond(&x.here, &y.here)?;
                ("where", here, x.plain.gt(&y.plain)?.where_cond(&x.plain, &y.plain)?)
            }
            6 if joins && b[dim] < size => {
                let start = self.dice.below(size - b[dim] + 1);
                let end = start + b[dim];
                let (before, after) = (narrow(&x.plain, dim, 0, start)?, narrow(&x.plain, dim, end, size - end)?);
                let plain = Tensor::cat(&[&before, &y.plain, &after], dim)?;
                ("slice_scatter", x.here.slice_scatter(&y.here, dim, start)?, plain)
            }
            7 => {
                let (end, start) = (narrow(&x.plain, dim, size - at, at)?, narrow(&x.plain, dim, 0, size - at)?);
                ("roll", x.here.roll(at as i32, dim)?, Tensor::cat(&[&end, &start], dim)?)
            }
            8 => {
                let (last, k) = (a.len() - 1, 1 + self.dice.below(a[a.len() - 1]));
                ("topk", x.here.topk(k)?.0, dense.sort_last_dim(false)?.0.narrow(last, 0, k)?)
            }
            9 => {
                let (ids, spread) = self.ids(4, size)?;
                ("index_select", x.here.index_select(&spread, dim)?, dense.index_select(&ids, dim)?)
            }
            10 if a == b => {
                let (ids, spread) = self.ids(size, size)?;
                let plain = dense.index_add(&ids, &y.plain.contiguous()?, dim)?;
                ("index_add", x.here.index_add(&spread, &y.here, dim)?, plain)
            }
            11 if size > 1 => ("var", x.here.var(dim)?, x.plain.var(dim)?),
            12 if a == b => {
                let plain = (&x.plain - &y.plain)?.sqr()?.mean_all()?;
                ("mse", x.here.mse_loss(&y.here, Reduction::Mean)?, plain)
            }
            13 if a == b => ("maximum", x.here.maximum(&y.here)?, x.plain.maximum(&y.plain)?),
            14 => {
                ("flip", x.here.flip(&[dim])?.pad_with_same(dim, 1, 0)?, dense.flip(&[dim])?.pad_with_same(dim, 1, 0)?)
            }
            15 if a == b => {
                ("stack", DTensor::stack(&[&x.here, &y.here], dim)?, Tensor::stack(&[&x.plain, &y.plain], dim)?)
            }
            _ => return Ok(None),
        };
        Ok(Some(made))
    }

    /// `count` indexes below `bound`, and the same on the mesh in some layout.
    fn ids(&mut self, count: usize, bound: usize) -> Result<(Tensor, DTensor)> {
        let ids: Vec<u32> = (0..count).map(|_| self.dice.below(bound) as u32).collect();
        let ids = Tensor::new(ids, &Device::Cpu)?;
        let at = (0..self.mesh.ndim()).map(|_| self.dice.pick(&[Replicate, Shard(0)])).collect_vec();
        let spread = DTensor::distribute(&ids, &self.mesh, &at)?;
        Ok((ids, spread))
    }
}
