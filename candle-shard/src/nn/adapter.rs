//! Adapters, and what they have at each module.
use crate::parallel::pattern::Pattern;
use crate::{Error, Result, Weights};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// How a low-rank adapter changes one layer: `y + scale · (dropout(x) · Aᵀ) · Bᵀ`, with `A` `[rank, in]` and `B` `[out, rank]`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LoraOptions {
    /// The rank.
    pub rank: usize,
    /// What the scale is made of: it is `alpha / rank`.
    pub alpha: f64,
    /// Whether the scale is `alpha / √rank` instead (Kalajdzievski 2023).
    pub rank_stabilized: bool,
    /// The probability with which an element of the adapter's input is zero in training.
    pub dropout: f64,
    /// Whether magnitudes of the weight's rows, or of a table's columns, are learned apart from their directions (DoRA, Liu et al. 2024).
    pub dora: bool,
    /// Whether `B` has a bias.
    pub bias: bool,
    /// The path whose `A` this layer uses, if it is not its own: layers that are parts of one weight in files have one `A`.
    pub a_of: Option<String>,
}

impl LoraOptions {
    /// An adapter of this rank, with `alpha` equal to it, so that the scale is 1.
    pub fn new(rank: usize) -> Self {
        Self {
            rank,
            alpha: rank as f64,
            rank_stabilized: false,
            dropout: 0.0,
            dora: false,
            bias: false,
            a_of: None,
        }
    }

    /// Sets what the scale is made of.
    pub fn alpha(self, alpha: f64) -> Self {
        Self { alpha, ..self }
    }

    /// Sets whether the scale is `alpha / √rank`.
    pub fn rank_stabilized(self, rank_stabilized: bool) -> Self {
        Self { rank_stabilized, ..self }
    }

    /// Sets the probability of dropout.
    pub fn dropout(self, dropout: f64) -> Self {
        Self { dropout, ..self }
    }

    /// Sets whether magnitudes are learned apart.
    pub fn dora(self, dora: bool) -> Self {
        Self { dora, ..self }
    }

    /// Sets whether `B` has a bias.
    pub fn bias(self, bias: bool) -> Self {
        Self { bias, ..self }
    }

    /// Sets the path whose `A` the layer uses.
    pub fn a_of(self, path: impl Into<String>) -> Self {
        Self { a_of: Some(path.into()), ..self }
    }

    /// Returns the factor of the adapter's product.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }
    }

    fn check(&self, adapter: &str, pattern: &str) -> Result<()> {
        let Self { rank, alpha, dropout, .. } = *self;
        let wrong = match () {
            () if rank == 0 => "rank 0; give at least 1".to_string(),
            () if !alpha.is_finite() => format!("alpha {alpha}; give a finite number"),
            () if !(0.0..1.0).contains(&dropout) => format!("dropout {dropout}; give a number in [0, 1)"),
            () => return Ok(()),
        };
        Err(Error::Plan(format!("adapter {adapter:?} has {pattern:?} with {wrong}")))
    }
}

/// A named set of changes to the layers of a model whose own parameters are frozen.
///
/// A pattern is that of a [`Plan`](crate::parallel::Plan): a module path whose parts may contain `*` and `?`. If several patterns
/// match, the last one wins. Each rank holds the shards of `A` and `B` that its shard of the weight needs, so an adapter adds no
/// communication to a pass: one all_reduce in [`Parameters::reduce`](crate::nn::Parameters::reduce) sums the gradients of the
/// factors that all ranks have.
#[derive(Clone, Debug)]
pub struct Adapter {
    name: String,
    entries: Vec<(Pattern, Option<LoraOptions>)>,
    trained: Vec<Pattern>,
    weights: Option<Arc<Weights>>,
}

impl Adapter {
    /// Creates an adapter without layers. Its name is a part of the names of its parameters:
    /// `<path of the layer>.lora_A.<name>.weight`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), entries: Vec::new(), trained: Vec::new(), weights: None }
    }

    /// Changes the layers that `pattern` matches: linear layers, projections of queries, keys and values, tables, experts, and convolutions
    /// without groups.
    pub fn with(mut self, pattern: impl Into<String>, options: LoraOptions) -> Self {
        self.entries.push((Pattern::new(pattern), Some(options)));
        self
    }

    /// Leaves the layers that `pattern` matches as they are.
    pub fn without(mut self, pattern: impl Into<String>) -> Self {
        self.entries.push((Pattern::new(pattern), None));
        self
    }

    /// Trains the parameters of the modules that `pattern` matches themselves: PEFT's `modules_to_save`. They are held as floats.
    pub fn train(mut self, pattern: impl Into<String>) -> Self {
        self.trained.push(Pattern::new(pattern));
        self
    }

    /// Reads the parameters of the adapter from files, under the names that they have in the model. Without it they are fresh:
    /// `A` is uniform in ±1/√in, and `B` is zero, so that the model computes what it does without the adapter.
    pub fn from_weights(self, weights: impl Into<Arc<Weights>>) -> Self {
        Self { weights: Some(weights.into()), ..self }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether it has factors beside the module at this path.
    pub fn changes(&self, path: &str) -> bool {
        let path: Vec<&str> = path.split('.').collect();
        let last = self.entries.iter().rev().find(|(pattern, _)| pattern.matches(&path));
        last.is_some_and(|(_, options)| options.is_some())
    }

    /// Returns whether it has modules that are [trained](Self::train) in place of those of the model.
    pub fn trains_modules(&self) -> bool {
        !self.trained.is_empty()
    }

    /// Returns the files of its parameters, if it does not begin with fresh ones.
    pub fn weights(&self) -> Option<&Arc<Weights>> {
        self.weights.as_ref()
    }
}

/// The adapters of a model, and which of their patterns have matched a module.
#[derive(Debug)]
pub(crate) struct AdapterSet {
    adapters: Vec<Adapter>,
    /// The texts of the patterns that have matched.
    matched: Mutex<BTreeSet<String>>,
}

impl AdapterSet {
    /// Checks adapters of one model.
    pub(crate) fn new(adapters: Vec<Adapter>) -> Result<Self> {
        let mut names = BTreeSet::new();
        for Adapter { name, entries, trained, .. } in &adapters {
            let is_plain = !name.is_empty() && !name.contains('.');
            if !is_plain || !names.insert(name.as_str()) {
                let wrong = if is_plain { "is given twice" } else { "is empty or has a dot" };
                return Err(Error::Plan(format!(
                    "the name {name:?} of an adapter {wrong}; give another one"
                )));
            }
            if entries.is_empty() && trained.is_empty() {
                return Err(Error::Plan(format!("adapter {name:?} has no layers; name some by a pattern")));
            }
            for (pattern, options) in entries {
                options.iter().try_for_each(|options| options.check(name, pattern.text()))?;
            }
        }
        if adapters.iter().filter(|adapter| !adapter.trained.is_empty()).count() > 0 && adapters.len() > 1 {
            return Err(Error::Plan(
                "an adapter that trains whole modules replaces those of the model; use it alone".into(),
            ));
        }
        Ok(Self { adapters, matched: Mutex::default() })
    }

    /// Returns the adapters.
    pub(crate) fn adapters(&self) -> &[Adapter] {
        &self.adapters
    }

    /// Returns the adapters that change the module at `path`, with their numbers.
    pub(crate) fn at(&self, path: &[String]) -> Vec<(usize, &Adapter, LoraOptions)> {
        let mut found = Vec::new();
        for (number, adapter) in self.adapters.iter().enumerate() {
            let mut last = None;
            for (pattern, options) in &adapter.entries {
                if pattern.matches(path) {
                    self.mark(pattern);
                    last = options.clone();
                }
            }
            found.extend(last.map(|options| (number, adapter, options)));
        }
        found
    }

    /// Returns the adapter that trains the module at `path` itself, if one does.
    pub(crate) fn trainer_of(&self, path: &[&str]) -> Option<&Adapter> {
        self.adapters.iter().find(|adapter| {
            let found = adapter.trained.iter().find(|pattern| pattern.matches(path));
            found.is_some_and(|pattern| {
                self.mark(pattern);
                true
            })
        })
    }

    fn mark(&self, pattern: &Pattern) {
        let mut matched = self.matched.lock().unwrap_or_else(PoisonError::into_inner);
        if !matched.contains(pattern.text()) {
            matched.insert(pattern.text().to_owned());
        }
    }

    /// Refuses patterns that matched no module.
    ///
    /// # Errors
    /// If there are some; they are named.
    pub(crate) fn check_matched(&self) -> Result<()> {
        check_patterns(&self.unmatched())
    }

    /// Returns the patterns that matched no module.
    pub(crate) fn unmatched(&self) -> BTreeSet<String> {
        let matched = self.matched.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |adapter: &Adapter| {
            let entries = adapter.entries.iter().map(|(pattern, _)| pattern);
            entries.chain(&adapter.trained).map(|pattern| pattern.text().to_owned()).collect::<Vec<_>>()
        };
        let patterns = self.adapters.iter().flat_map(of);
        patterns.filter(|pattern| !matched.contains(pattern)).collect()
    }
}

/// Refuses patterns of adapters that matched no module.
///
/// # Errors
/// If there are some; they are named.
pub(in crate::nn) fn check_patterns<'a>(unmatched: impl IntoIterator<Item = &'a String>) -> Result<()> {
    let names: Vec<String> = unmatched.into_iter().map(|pattern| format!("{pattern:?}")).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(Error::Plan(format!(
        "{} of the adapters matched no module that takes an adapter; check the paths against the model's parameter names",
        names.join(", ")
    )))
}
