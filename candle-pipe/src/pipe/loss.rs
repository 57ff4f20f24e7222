//! The choice of the loss among the outputs, as a tree of booleans.
use crate::graph::{LossReduction, Output};
use crate::microbatch::{ChunkSpec, LossReducer};
use crate::value::{Children, containers, entries, items, write_list, write_map, write_tuple};
use crate::{Error, Result, Value, ValuePath};
use itertools::Itertools;
use std::collections::BTreeMap;
use std::fmt;

/// The name of the output that is the loss by default.
pub(crate) const NAME: &str = "loss";

/// A choice of the loss: a boolean for each of a model's outputs, in their structure. One of them is true.
///
/// Its root is a map by the outputs' names, a tuple or list in the order of declaration, or `true` for a model with one
/// output. `false` means that the model has no loss, whatever the names of its outputs. If an output is a container,
/// the spec continues in it. Convert from `bool`, from tuples, vectors, arrays and maps of specs, or from a
/// [`ChunkSpec`], where a [`LossReducer`] marks the loss.
///
/// ```
/// use candle_pipe::LossSpec;
///
/// let spec = LossSpec::from((false, [true, false]));
/// assert_eq!(spec.to_string(), "(false, [true, false])");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossSpec {
    /// Whether this value is the loss; `false` for a container means none of its values.
    Is(bool),
    /// One for each value of a list or tuple.
    List(Vec<LossSpec>),
    /// One for each value of a tuple or list.
    Tuple(Vec<LossSpec>),
    /// One for each name of a map.
    Map(BTreeMap<String, LossSpec>),
}

containers!(LossSpec);

impl From<bool> for LossSpec {
    fn from(is_loss: bool) -> Self {
        Self::Is(is_loss)
    }
}

impl From<&ChunkSpec> for LossSpec {
    fn from(spec: &ChunkSpec) -> Self {
        match spec {
            ChunkSpec::Loss(_) => Self::Is(true),
            ChunkSpec::List(specs) => Self::List(specs.iter().map(Self::from).collect()),
            ChunkSpec::Tuple(specs) => Self::Tuple(specs.iter().map(Self::from).collect()),
            ChunkSpec::Map(specs) => {
                Self::Map(specs.iter().map(|(key, spec)| (key.clone(), spec.into())).collect())
            }
            ChunkSpec::Split(_) | ChunkSpec::Replicate | ChunkSpec::Reduce(_) => Self::Is(false),
        }
    }
}

impl LossSpec {
    /// Returns the output with the loss, and the spec within it; `None` for a model without a loss.
    pub(super) fn find<'a>(&'a self, outputs: &'a [Output]) -> Result<Option<(&'a Output, &'a Self)>> {
        let names = || outputs.iter().map(|output| &output.name).join(", ");
        let wrong = |reason: String| Err(Error::Pipe(format!("the loss spec {self} {reason}")));
        let pairs: Vec<(&Output, &Self)> = match self {
            Self::Is(false) => return Ok(None),
            Self::Is(true) => outputs.iter().map(|output| (output, self)).collect(),
            Self::List(specs) | Self::Tuple(specs) if specs.len() == outputs.len() => {
                outputs.iter().zip(specs).collect()
            }
            Self::List(specs) | Self::Tuple(specs) => {
                let (specs, outputs) = (specs.len(), outputs.len());
                return wrong(format!(
                    "has {specs} entries for the {outputs} outputs [{}]; give each one",
                    names()
                ));
            }
            Self::Map(specs) => {
                if let Some(name) =
                    specs.keys().find(|name| outputs.iter().all(|output| output.name != **name))
                {
                    return wrong(format!("names {name:?}, which is not one of the outputs [{}]", names()));
                }
                if let Some(output) = outputs.iter().find(|output| !specs.contains_key(&output.name)) {
                    return wrong(format!(
                        "leaves out the output {:?}; say false for what is no loss",
                        output.name
                    ));
                }
                outputs.iter().map(|output| (output, &specs[&output.name])).collect()
            }
        };
        let truths: usize = pairs.iter().map(|(_, spec)| spec.truths()).sum();
        match (truths, pairs.into_iter().find(|(_, spec)| spec.truths() > 0)) {
            (1, found) => Ok(found),
            (0, _) => wrong("has no true in it; say which value is the loss, or false for none".into()),
            _ => wrong(format!(
                "stands for {truths} losses in the outputs [{}]; add them up in a function",
                names()
            )),
        }
    }

    /// Returns the loss in a value, which must have the structure of the spec.
    pub(super) fn pick<'a>(&self, path: &ValuePath, value: &'a Value) -> Result<&'a Value> {
        let Some(specs) = self.children() else { return Ok(value) };
        let unlike = || {
            Error::Pipe(format!(
                "{path} is {value}, which does not have the structure of the loss spec {self}"
            ))
        };
        let values = value.children().ok_or_else(unlike)?;
        if !values.iter().map(|(step, _)| step).eq(specs.iter().map(|(step, _)| step)) {
            return Err(unlike());
        }
        let place = specs.iter().position(|(_, spec)| spec.truths() > 0).ok_or_else(unlike)?;
        let (step, inner) = values[place];
        specs[place].1.pick(&path.step(step), inner)
    }

    fn truths(&self) -> usize {
        match (self, self.children()) {
            (_, Some(children)) => children.iter().map(|(_, spec)| spec.truths()).sum(),
            (spec, None) => usize::from(*spec == Self::Is(true)),
        }
    }

    fn children(&self) -> Option<Children<'_, Self>> {
        match self {
            Self::Is(_) => None,
            Self::List(specs) | Self::Tuple(specs) => Some(items(specs)),
            Self::Map(specs) => Some(entries(specs)),
        }
    }
}

/// Returns the reduction of a spec's loss reducer, or an error if there is none, or a custom one.
pub(super) fn reduction(spec: &ChunkSpec) -> Result<LossReduction> {
    fn reducers(spec: &ChunkSpec) -> Vec<&LossReducer> {
        match (spec, spec.children()) {
            (ChunkSpec::Loss(reducer), _) => vec![reducer],
            (_, Some(children)) => children.into_iter().flat_map(|(_, spec)| reducers(spec)).collect(),
            _ => Vec::new(),
        }
    }
    let found = reducers(spec);
    let reduction = found.first().and_then(|reducer| reducer.reduction());
    reduction.ok_or_else(|| {
        let what =
            if found.is_empty() { "has no loss reducer" } else { "has a loss reducer of its own kind" };
        let fix = "give LossReducer::sum_reducer() or mean_reducer() for the loss, whose gradient is known";
        Error::Pipe(format!("the chunk spec {spec} {what}; {fix}"))
    })
}

impl fmt::Display for LossSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Is(is_loss) => write!(f, "{is_loss}"),
            Self::List(specs) => write_list(f, specs),
            Self::Tuple(specs) => write_tuple(f, specs),
            Self::Map(specs) => write_map(f, specs),
        }
    }
}
