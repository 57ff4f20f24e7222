//! Which adapters run.
use crate::nn::{Dropout, MeshVarBuilder, Mode};
use crate::{DTensor, Error, Result, TokenOrder};
use itertools::Itertools;
use std::cell::RefCell;
use std::ops::Range;
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
    chosen: ChosenAdapters,
    mode: Mode,
    /// The order of the tokens, along dim 1 of what layers get.
    order: Option<TokenOrder>,
}

/// Which adapters run.
#[derive(Clone, Debug)]
enum ChosenAdapters {
    All,
    /// The numbers of the adapters and what each counts.
    Some(Vec<(usize, AdapterWeight)>),
    /// Those of rows one behind another: how many rows there are, and theirs.
    OfRows(Vec<(usize, RowAdapters)>),
}

/// Which adapters change a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowAdapters {
    /// All of them.
    #[default]
    All,
    /// None: the row is that of the model itself.
    Model,
    /// That of this number, from 0, in the order in which the model got them.
    One(usize),
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
        Ok(Self { chosen: ChosenAdapters::Some(adapters), ..Self::all() })
    }

    /// The adapters of rows: so many rows one behind another along dim 1 of what layers get, and those that change them.
    ///
    /// A layer computes the product with its weight once for all rows, and what an adapter adds for the rows of that adapter alone. It
    /// communicates as often as with one adapter.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_dist::World;
    /// # use candle_shard::nn::{ActiveAdapters, Adapter, Linear, LoraOptions, MeshVarBuilder, RowAdapters};
    /// # use candle_shard::parallel::Plan;
    /// # use candle_shard::{DTensor, Replicate, Result};
    /// # World::threads(1).run(|ctx| -> Result<()> {
    /// # let mesh = ctx.mesh(&[("tp", 1)])?;
    /// # let vb = MeshVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &Device::Cpu)?;
    /// let of = |name: &str| Adapter::new(name).with("up", LoraOptions::new(2));
    /// let vb = vb.with_adapters([of("french"), of("german")])?;
    /// let layer = Linear::new(4, 6, false, &vb.pp("up"))?;
    /// let x = DTensor::ones((1, 5, 4), DType::F32, &Device::Cpu, &mesh, &[Replicate])?;
    /// // Two tokens with "german", and three without an adapter.
    /// let rows = ActiveAdapters::of_rows([(2, RowAdapters::One(1)), (3, RowAdapters::Model)]);
    /// assert_eq!(rows.run(|| layer.forward(&x))?.dims(), [1, 5, 6]);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn of_rows(rows: impl IntoIterator<Item = (usize, RowAdapters)>) -> Self {
        let rows =
            rows.into_iter().filter(|(count, _)| *count > 0).coalesce(|one, next| match one.1 == next.1 {
                true => Ok((one.0 + next.0, one.1)),
                false => Err((one, next)),
            });
        Self { chosen: ChosenAdapters::OfRows(rows.collect()), ..Self::all() }
    }

    /// No adapter: the model itself, with modules that an adapter trains in their place as they are.
    pub fn none() -> Self {
        Self { chosen: ChosenAdapters::Some(Vec::new()), ..Self::all() }
    }

    /// All adapters.
    pub fn all() -> Self {
        Self { chosen: ChosenAdapters::All, mode: Mode::Eval, order: None }
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
        let one = AdapterWeight::Factor(1.0);
        match &self.chosen {
            ChosenAdapters::All => Some(one),
            ChosenAdapters::Some(adapters) => {
                adapters.iter().find(|(one, _)| *one == number).map(|(_, weight)| weight.clone())
            }
            ChosenAdapters::OfRows(rows) => {
                let runs =
                    |of: &RowAdapters| matches!(of, RowAdapters::All) || *of == RowAdapters::One(number);
                rows.iter().any(|(_, of)| runs(of)).then_some(one)
            }
        }
    }

    /// The same for rows that have these adapters.
    fn with_rows(&self, rows: RowAdapters) -> Self {
        let chosen = match rows {
            RowAdapters::All => ChosenAdapters::All,
            RowAdapters::Model => ChosenAdapters::Some(Vec::new()),
            RowAdapters::One(number) => ChosenAdapters::Some(vec![(number, AdapterWeight::Factor(1.0))]),
        };
        Self { chosen, mode: self.mode, order: self.order.clone() }
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

    /// Returns what `f` makes of inputs whose rows lie along `dim`, in which it has the adapters that run. Rows with other adapters
    /// than others are computed apart, and then joined in their order.
    ///
    /// # Errors
    /// If the adapters are those of other rows than there are; those of `f`.
    pub(in crate::nn) fn by_rows<const N: usize>(
        inputs: [&DTensor; N],
        dim: usize,
        f: impl Fn([&DTensor; N]) -> Result<DTensor>,
    ) -> Result<DTensor> {
        let scope = Self::current();
        let Some(active) = scope.0.as_deref() else { return f(inputs) };
        let ChosenAdapters::OfRows(rows) = &active.chosen else { return f(inputs) };
        let count: usize = rows.iter().map(|(count, _)| count).sum();
        if let Some(other) = inputs.iter().find(|input| input.dims().get(dim) != Some(&count)) {
            let reason = format!("{}, and the adapters are those of {count} rows of dim {dim}", other.spec());
            return Error::op("adapters of rows", reason);
        }
        let within = |of: RowAdapters| Self(Some(Arc::new(active.with_rows(of))));
        if let [(_, of)] = rows[..] {
            return within(of).run(|| f(inputs));
        }
        let mut end = 0;
        let ranges = rows.iter().map(|&(count, of)| {
            end += count;
            (of, end - count..end)
        });
        let mut parts: Vec<(usize, DTensor)> = Vec::new();
        for (of, ranges) in ranges.into_group_map().into_iter().sorted_by_key(|(of, _)| *of) {
            let chosen = |input: &DTensor| -> Result<DTensor> {
                let of_range = |range: &Range<usize>| input.narrow(dim, range.start, range.len());
                match &ranges[..] {
                    [range] => of_range(range),
                    ranges => DTensor::cat(&ranges.iter().map(of_range).collect::<Result<Vec<_>>>()?, dim),
                }
            };
            let chosen: Vec<DTensor> = inputs.iter().map(|input| chosen(input)).collect::<Result<_>>()?;
            let made = within(of).run(|| f(std::array::from_fn(|at| &chosen[at])))?;
            let mut start = 0;
            for range in ranges {
                parts.push((range.start, made.narrow(dim, start, range.len())?));
                start += range.len();
            }
        }
        parts.sort_by_key(|(start, _)| *start);
        DTensor::cat(&parts.into_iter().map(|(_, part)| part).collect::<Vec<_>>(), dim)
    }

    /// Returns how much the adapter of a number counts, if it runs.
    pub(super) fn of(number: usize) -> Option<AdapterWeight> {
        ACTIVE.with_borrow(|active| match active {
            None => Some(AdapterWeight::Factor(1.0)),
            Some(active) => active.weight(number),
        })
    }

    /// Returns how much the adapter of a number counts, if it runs, for layers that cannot tell rows from each other.
    ///
    /// # Errors
    /// If rows have adapters or weights of their own; it has the operation and the words for the layer.
    pub(in crate::nn) fn of_all_rows(op: &'static str, layer: &str, number: usize) -> Result<Option<f64>> {
        let is_of_rows = ACTIVE.with_borrow(|active| {
            matches!(active.as_deref(), Some(ActiveAdapters { chosen: ChosenAdapters::OfRows(rows), .. }) if rows.len() > 1)
        });
        match Self::of(number) {
            None => Ok(None),
            Some(AdapterWeight::Factor(factor)) if !is_of_rows => Ok(Some(factor)),
            Some(_) => Error::op(
                op,
                format!("an adapter of {layer} for some rows alone, which is unsupported; give all rows one"),
            ),
        }
    }

    /// What a layer's input is for an adapter that drops out.
    pub(super) fn drop_out(dropout: &Dropout, x: &DTensor) -> Result<DTensor> {
        let active = Self::current();
        match &active.0 {
            None => Ok(x.clone()),
            Some(active) => dropout.forward_in_order(x, active.mode, active.order.as_ref()),
        }
    }

    /// The same for a layer whose input has no dim of tokens.
    pub(super) fn drop_out_anywhere(dropout: &Dropout, x: &DTensor) -> Result<DTensor> {
        match &Self::current().0 {
            None => Ok(x.clone()),
            Some(active) => dropout.forward(x, active.mode),
        }
    }

    /// Returns whether nothing drops out.
    pub(super) fn keeps_all(dropout: &Dropout) -> bool {
        ACTIVE.with_borrow(|active| active.as_ref().is_none_or(|active| dropout.is_identity(active.mode)))
    }
}
