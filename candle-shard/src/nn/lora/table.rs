//! The adapters of a table.
use super::active::AdapterScope;
use super::layer::{FactorPlacements, LayerAdapters, Magnitudes, ROWS, refuse_magnitudes, scaled, weighted};
use crate::layout::{Placement, Replicate, Shard};
use crate::nn::adapter::LoraOptions;
use crate::nn::{Init, MeshVarBuilder, Width};
use crate::random::Distribution;
use crate::{DTensor, Result};

/// The adapters of a table, of which some run.
#[derive(Debug, Clone, Default)]
pub(crate) struct TableAdapters(LayerAdapters<TableAdapter>);

/// `A` `[rank, rows]`, whose columns are looked up, and `B` `[width, rank]` beside a table `[rows, width]`. Magnitudes are those of the columns.
#[derive(Debug)]
struct TableAdapter {
    a: DTensor,
    b: DTensor,
    magnitudes: Option<Magnitudes>,
    scale: f64,
}

impl TableAdapters {
    /// The adapters of the table at the builder's path, which is placed as `table` on the plan's axis. Without initial values, which may
    /// have a row of zeros, it is a tied one, and may be made anew in each forward pass.
    ///
    /// # Errors
    /// If one of them has a bias, or fresh magnitudes of a tied table that files do not have under this path.
    pub(crate) fn new(
        [rows, width]: [usize; 2],
        (table, varying): (Placement, bool),
        init: Option<(Init, Option<usize>)>,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let is_tied = init.is_none();
        let init = match init {
            Some(init) => init,
            None => {
                let concerns = |vb: &MeshVarBuilder| vb.is_fresh_adapter() && !vb.has_base();
                refuse_magnitudes(vb, concerns, "the table of another layer; leave it out")?;
                (Init::Const(0.0), None)
            }
        };
        let adapter = |vb: &MeshVarBuilder, options: &LoraOptions| {
            if options.bias {
                let name = vb.adapter_name();
                return Err(vb.style().error(format_args!(
                    "is a table with the adapter {name:?}, which has a bias; leave the table out, or give it options without"
                )));
            }
            // A table is the transpose of a linear layer's weight.
            let at = match table {
                Shard(0) => FactorPlacements::beside(Shard(1)),
                Shard(_) => FactorPlacements::beside(Shard(0)),
                _ => FactorPlacements { a: (Replicate, varying), b: (Replicate, varying) },
            };
            let name = |factor: &str| format!("{factor}.{}", vb.adapter_name());
            let normal = Init::Random(Distribution::Normal { mean: 0.0, stdev: 1.0 });
            let (rank, zero) = (Width::from(options.rank), Init::Const(0.0));
            let a = vb.factor(&name("lora_embedding_A"), &[rank, rows.into()], zero, at.a, is_tied)?;
            let b = vb.factor(&name("lora_embedding_B"), &[width.into(), rank], normal, at.b, is_tied)?;
            let of_columns = format!("{}.weight", name("lora_magnitude_vector"));
            let magnitudes = || {
                let build = || vb.column_norms([rows, width], init, at.b, &of_columns);
                let made = if is_tied { vb.shared_factor(&of_columns, build) } else { build() };
                made.map(|values| Magnitudes::new(values, vb))
            };
            let magnitudes = options.dora.then(magnitudes).transpose()?;
            Ok(TableAdapter { a, b, magnitudes, scale: options.scale() })
        };
        LayerAdapters::build(vb, adapter).map(Self)
    }

    /// Returns `y`, the rows of the table at `ids`, with what the running adapters add; `table` returns the table as floats.
    pub(crate) fn add(
        &self,
        y: DTensor,
        ids: &DTensor,
        table: &dyn Fn() -> Result<DTensor>,
    ) -> Result<DTensor> {
        if self.0.is_idle() {
            return Ok(y);
        }
        AdapterScope::by_rows([&y, ids], ROWS, |[y, ids]| {
            self.0.active().try_fold(y.clone(), |sum, (adapter, weight)| {
                sum.add(&weighted(&adapter.forward([y, ids], table)?, &weight)?)
            })
        })
    }
}

impl TableAdapter {
    /// Returns what this adapter adds to `y`, the rows of the table at `ids`.
    fn forward(&self, [y, ids]: [&DTensor; 2], table: &dyn Fn() -> Result<DTensor>) -> Result<DTensor> {
        let narrow = self.a.t()?.embedding(ids)?;
        let made = scaled(&narrow, self.scale)?.linear(&self.b, None)?;
        let Some(magnitudes) = &self.magnitudes else { return Ok(made) };
        let ratio = magnitudes.ratio(&|| self.norms(&table()?))?;
        y.mul(&ratio.affine(1.0, -1.0)?)?.add(&made.mul(&ratio)?)
    }

    /// Returns the norm of each column of the changed table, without a gradient.
    fn norms(&self, table: &DTensor) -> Result<DTensor> {
        let changed = self.a.detach().t()?.matmul(&self.b.detach().t()?)?.affine(self.scale, 0.0)?;
        let changed = table.detach().add(&changed)?.detach();
        changed.sqr()?.sum(0)?.resolve_partial()?.sqrt()
    }
}
