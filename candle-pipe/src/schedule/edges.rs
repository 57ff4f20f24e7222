//! The stages that use values of each stage.
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// For each stage, the later stages that use its values.
///
/// ```
/// use candle_pipe::schedule::Edges;
///
/// assert_eq!(Edges::chain(3), Edges::new(3, [(0, 1), (1, 2)])?);
/// let skip = Edges::new(3, [(0, 1), (1, 2), (0, 2)])?;
/// assert_eq!((skip.consumers(0), skip.producers(2)), (&[1, 2][..], &[0, 1][..]));
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<Vec<usize>>", try_from = "Vec<Vec<usize>>")]
pub struct Edges {
    consumers: Vec<Vec<usize>>,
    producers: Vec<Vec<usize>>,
}

impl Edges {
    /// Creates a chain: each stage sends to the next.
    pub fn chain(stages: usize) -> Self {
        Self {
            consumers: (1..=stages).map(|next| if next < stages { vec![next] } else { vec![] }).collect(),
            producers: (0..stages).map(|stage| stage.checked_sub(1).into_iter().collect()).collect(),
        }
    }

    /// Creates edges from the first to the second stage of each pair; duplicates are ignored.
    ///
    /// # Errors
    /// If the second stage of a pair is not a later one of the `stages`.
    pub fn new(stages: usize, pairs: impl IntoIterator<Item = (usize, usize)>) -> Result<Self> {
        let mut edges = Self { consumers: vec![vec![]; stages], producers: vec![vec![]; stages] };
        for (from, to) in pairs {
            if from >= to || to >= stages {
                let said = format!(
                    "an edge from stage {from} to stage {to} of {stages} stages: give a stage and a later one"
                );
                return Err(Error::Schedule(said));
            }
            edges.consumers[from].push(to);
            edges.producers[to].push(from);
        }
        for list in edges.consumers.iter_mut().chain(&mut edges.producers) {
            list.sort_unstable();
            list.dedup();
        }
        Ok(edges)
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.consumers.len()
    }

    /// Returns the stages that use values of `stage`, in order; none for a stage that does not exist.
    pub fn consumers(&self, stage: usize) -> &[usize] {
        self.consumers.get(stage).map_or(&[], Vec::as_slice)
    }

    /// Returns the stages whose values `stage` uses, in order; none for a stage that does not exist.
    pub fn producers(&self, stage: usize) -> &[usize] {
        self.producers.get(stage).map_or(&[], Vec::as_slice)
    }

    /// Refuses edges for another number of stages.
    pub(super) fn fit(&self, stages: usize) -> Result<()> {
        if self.stages() == stages {
            return Ok(());
        }
        Err(Error::Schedule(format!("edges of {} stages do not fit a schedule of {stages}", self.stages())))
    }
}

impl From<Edges> for Vec<Vec<usize>> {
    fn from(edges: Edges) -> Self {
        edges.consumers
    }
}

impl TryFrom<Vec<Vec<usize>>> for Edges {
    type Error = Error;

    fn try_from(consumers: Vec<Vec<usize>>) -> Result<Self> {
        let pairs =
            consumers.iter().enumerate().flat_map(|(from, list)| list.iter().map(move |&to| (from, to)));
        Self::new(consumers.len(), pairs)
    }
}
