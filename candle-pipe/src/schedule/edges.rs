//! Which stage takes values of which.
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// For each stage the later stages that take values of it.
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
    /// Each stage gives to the next.
    pub fn chain(stages: usize) -> Self {
        Self {
            consumers: (1..=stages).map(|next| if next < stages { vec![next] } else { vec![] }).collect(),
            producers: (0..stages).map(|stage| stage.checked_sub(1).into_iter().collect()).collect(),
        }
    }

    /// The stages of each pair give from the first to the second, however often it is named.
    ///
    /// # Errors
    /// If a pair does not go to a later one of the `stages`.
    pub fn new(stages: usize, pairs: impl IntoIterator<Item = (usize, usize)>) -> Result<Self> {
        let mut edges = Self { consumers: vec![vec![]; stages], producers: vec![vec![]; stages] };
        for (from, to) in pairs {
            if from >= to || to >= stages {
                let said = format!("an edge from stage {from} to stage {to} goes to no later one of {stages} stages");
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

    /// How many stages there are.
    pub fn stages(&self) -> usize {
        self.consumers.len()
    }

    /// The stages that take values of `stage`, in order; none for a stage that there is not.
    pub fn consumers(&self, stage: usize) -> &[usize] {
        self.consumers.get(stage).map_or(&[], Vec::as_slice)
    }

    /// The stages that `stage` takes values of, in order; none for a stage that there is not.
    pub fn producers(&self, stage: usize) -> &[usize] {
        self.producers.get(stage).map_or(&[], Vec::as_slice)
    }

    /// Refuses edges of another number of stages.
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
        let pairs = consumers.iter().enumerate().flat_map(|(from, list)| list.iter().map(move |&to| (from, to)));
        Self::new(consumers.len(), pairs)
    }
}
