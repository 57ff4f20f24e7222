//! Which adapters run.
use crate::nn::{Dropout, MeshVarBuilder, Mode};
use crate::{DTensor, Error, Result, TokenOrder};
use itertools::Itertools;
use std::cell::RefCell;
use std::sync::Arc;

/// Which adapters of a model run, how much each counts, and whether they drop out.
///
/// A model runs all of its adapters, in evaluation, where nothing else is said.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::nn::{ActiveAdapters, Adapter, Linear, LoraOptions, MeshVarBuilder};
/// use candle_shard::parallel::Plan;
/// use candle_shard::{DTensor, Replicate, Result};
///
/// World::threads(1).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 1)])?;
///     let vb = MeshVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
///     let of = |name: &str| Adapter::new(name).with("up", LoraOptions::new(2));
///     let vb = vb.with_adapters([of("french"), of("german")])?;
///     let layer = Linear::new(4, 6, false, &vb.pp("up"))?;
///     assert_eq!(vb.finish()?.vars().len(), 4); // A and B of each; the weight is frozen
///     let x = DTensor::ones((1, 4), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
///     let both = ActiveAdapters::of(&vb, [("french", 0.5), ("german", 0.5)])?;
///     both.run(|| layer.forward(&x))?;
///     ActiveAdapters::none().run(|| layer.forward(&x))?; // the model itself
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ActiveAdapters {
    /// The numbers of the adapters and what each counts; `None` for all.
    adapters: Option<Vec<(usize, AdapterWeight)>>,
    mode: Mode,
    /// The order of the tokens, along dim 1 of what layers get.
    order: Option<TokenOrder>,
}

/// How much an adapter counts.
#[derive(Clone, Debug)]
pub enum AdapterWeight {
    /// Equally much everywhere.
    Factor(f64),
    /// A number for each row: a tensor that is broadcast to the layer's input, whose last dim is 1.
    Rows(DTensor),
}

impl From<f64> for AdapterWeight {
    fn from(factor: f64) -> Self {
        Self::Factor(factor)
    }
}

impl From<DTensor> for AdapterWeight {
    fn from(rows: DTensor) -> Self {
        Self::Rows(rows)
    }
}

thread_local! {
    static ACTIVE: RefCell<Option<Arc<ActiveAdapters>>> = const { RefCell::new(None) };
}

impl ActiveAdapters {
    /// The adapters of these names, and how much each counts.
    ///
    /// # Errors
    /// If the model has no adapter of a name, or a name comes twice.
    pub fn of<W: Into<AdapterWeight>>(
        vb: &MeshVarBuilder,
        adapters: impl IntoIterator<Item = (impl AsRef<str>, W)>,
    ) -> Result<Self> {
        let number = |name: &str| {
            let mut names = vb.adapter_names();
            names.position(|known| known == name).ok_or_else(|| {
                let names: Vec<&str> = vb.adapter_names().collect();
                Error::Plan(format!("the model has no adapter {name:?}, and these: {}", names.join(", ")))
            })
        };
        let adapters = adapters.into_iter().map(|(name, weight)| Ok((number(name.as_ref())?, weight.into())));
        let adapters: Vec<(usize, AdapterWeight)> = adapters.collect::<Result<_>>()?;
        if let Some((twice, _)) = adapters.iter().duplicates_by(|(number, _)| *number).next() {
            let name = vb.adapter_names().nth(*twice).unwrap_or_default();
            return Err(Error::Plan(format!("the adapter {name:?} is given twice; give each one once")));
        }
        Ok(Self { adapters: Some(adapters), ..Self::all() })
    }

    /// No adapter: the model itself, with modules that an adapter trains in their place as they are.
    pub fn none() -> Self {
        Self { adapters: Some(Vec::new()), ..Self::all() }
    }

    /// All adapters.
    pub fn all() -> Self {
        Self { adapters: None, mode: Mode::Eval, order: None }
    }

    /// Those that run now.
    pub fn current() -> Self {
        ACTIVE.with_borrow(|active| active.as_deref().cloned()).unwrap_or_else(Self::all)
    }

    /// Sets whether adapters drop out, and in which step.
    pub fn mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Sets the order in which layers get tokens, along dim 1 of their inputs `[rows, tokens, ..]`: each drops out as at its position.
    /// Without it, they lie in the order of their positions.
    pub fn token_order(self, order: Option<TokenOrder>) -> Self {
        Self { order, ..self }
    }

    /// Runs `f`, in which layers use these adapters. Segments that the backward pass [recomputes](crate::nn::recompute) use those
    /// of their forward pass.
    pub fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        AdapterScope(Some(Arc::new(self.clone()))).run(f)
    }

    /// Returns how much the adapter of a number counts, if it runs.
    fn weight(&self, number: usize) -> Option<AdapterWeight> {
        match &self.adapters {
            None => Some(AdapterWeight::Factor(1.0)),
            Some(adapters) => {
                adapters.iter().find(|(one, _)| *one == number).map(|(_, weight)| weight.clone())
            }
        }
    }
}

/// What runs on this thread, for who runs a closure again later.
#[derive(Clone)]
pub(crate) struct AdapterScope(Option<Arc<ActiveAdapters>>);

impl AdapterScope {
    /// Returns what runs now.
    pub(crate) fn current() -> Self {
        Self(ACTIVE.with_borrow(Clone::clone))
    }

    /// Runs `f` with these adapters, and then restores those that ran, even if `f` panics.
    pub(crate) fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Restored(Option<Arc<ActiveAdapters>>);
        impl Drop for Restored {
            fn drop(&mut self) {
                ACTIVE.replace(self.0.take());
            }
        }
        let _before = Restored(ACTIVE.replace(self.0.clone()));
        f()
    }

    /// Returns how much the adapter of a number counts, if it runs.
    pub(super) fn of(number: usize) -> Option<AdapterWeight> {
        ACTIVE.with_borrow(|active| match active {
            None => Some(AdapterWeight::Factor(1.0)),
            Some(active) => active.weight(number),
        })
    }

    /// What a layer's input is for an adapter that drops out.
    pub(super) fn drop_out(dropout: &Dropout, x: &DTensor) -> Result<DTensor> {
        let active = Self::current();
        match &active.0 {
            None => Ok(x.clone()),
            Some(active) => dropout.forward_in_order(x, active.mode, active.order.as_ref()),
        }
    }

    /// Returns whether nothing drops out.
    pub(super) fn keeps_all(dropout: &Dropout) -> bool {
        ACTIVE.with_borrow(|active| active.as_ref().is_none_or(|active| dropout.is_identity(active.mode)))
    }
}
