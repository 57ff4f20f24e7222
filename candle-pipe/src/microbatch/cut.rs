//! Chooses the dim along which every tensor is cut, and checks it before anything is cut.
use super::{ChunkSpec, KwargsSpec, TensorChunkSpec};
use crate::cuts::chunk_range;
use crate::value::{Children, entries, items};
use crate::{Error, Kwargs, Result, Value, ValuePath};
use candle_core::Tensor;

/// How one tensor is cut.
#[derive(Debug)]
pub(super) struct ValueCut {
    path: ValuePath,
    dim: usize,
    /// The size of the dim, which is the most chunks possible.
    pub(super) rows: usize,
}

/// How the tensors are cut, in the tree's order; `None` for a tensor that every chunk gets whole.
#[derive(Debug, Default)]
pub(super) struct InputCuts(Vec<Option<ValueCut>>);

impl InputCuts {
    pub(super) fn new(
        args: &[Value],
        kwargs: &Kwargs,
        args_spec: Option<&[ChunkSpec]>,
        kwargs_spec: Option<&KwargsSpec>,
    ) -> Result<Self> {
        let mut cuts = Self::default();
        cuts.all(&ValuePath::new("args"), &items(args), args_spec.map(items), &ChunkSpec::DEFAULT)?;
        cuts.all(&ValuePath::new("kwargs"), &entries(kwargs), kwargs_spec.map(entries), &ChunkSpec::DEFAULT)?;
        Ok(cuts)
    }

    /// Returns the cuts of the tensors that are cut.
    pub(super) fn cuts(&self) -> impl Iterator<Item = &ValueCut> {
        self.0.iter().flatten()
    }

    /// Returns the dim along which each tensor is cut, in the tree's order.
    pub(super) fn dims(&self) -> impl Iterator<Item = Option<usize>> {
        self.tensors().map(|cut| cut.map(|cut| cut.dim))
    }

    /// Returns every tensor, in the tree's order.
    pub(super) fn tensors(&self) -> impl Iterator<Item = Option<&ValueCut>> {
        self.0.iter().map(Option::as_ref)
    }

    /// Returns an error that names the first two tensors that disagree in the size of the batch.
    pub(super) fn check_one_batch_size(&self) -> Result<()> {
        let mut cuts = self.cuts();
        let Some(first) = cuts.next() else { return Ok(()) };
        match cuts.find(|cut| cut.rows != first.rows) {
            None => Ok(()),
            Some(other) => Err(Error::Microbatches(format!(
                "{} has {} rows along dim {}, {} has {} along dim {}; give both the same batch size, Replicate one of \
                 them, or allow it with Splitter::unequal_batches",
                first.path, first.rows, first.dim, other.path, other.rows, other.dim
            ))),
        }
    }

    /// Returns an error unless the tensors that are cut have `rows` rows, and `rows` is not 0.
    pub(super) fn check_rows(&self, rows: Option<usize>) -> Result<()> {
        let Some(rows) = rows else { return Ok(()) };
        if rows == 0 {
            return Err(Error::Microbatches("a batch of 0 rows cannot be cut; say how many it has".into()));
        }
        match self.cuts().find(|cut| cut.rows != rows) {
            None => Ok(()),
            Some(cut) => {
                let (path, has, dim) = (&cut.path, cut.rows, cut.dim);
                let reason =
                    format!("{path} has {has} rows along dim {dim} in a batch of {rows} by Splitter::rows");
                Err(Error::Microbatches(format!("{reason}; give both the same number")))
            }
        }
    }

    /// Plans the values of a container: each under its own spec, or all under the container's.
    fn all(
        &mut self,
        path: &ValuePath,
        values: &Children<'_, Value>,
        specs: Option<Children<'_, ChunkSpec>>,
        container: &ChunkSpec,
    ) -> Result<()> {
        if let Some(specs) = &specs {
            check_steps(path, values, specs)?;
        }
        for (k, (step, value)) in values.iter().enumerate() {
            let (spec, covered) = specs.as_ref().map_or((container, true), |specs| (specs[k].1, false));
            self.one(&path.step(*step), value, spec, covered)?;
        }
        Ok(())
    }

    /// `covered`: the spec is that of a container around the value.
    fn one(&mut self, path: &ValuePath, value: &Value, spec: &ChunkSpec, covered: bool) -> Result<()> {
        match (value.children(), spec.children()) {
            (Some(values), specs) => self.all(path, &values, specs, spec),
            (None, Some(_)) => Err(unlike(path, value, spec)),
            (None, None) => self.leaf(path, value, spec, covered),
        }
    }

    fn leaf(&mut self, path: &ValuePath, value: &Value, spec: &ChunkSpec, covered: bool) -> Result<()> {
        match (value, spec) {
            (Value::Tensor(tensor), ChunkSpec::Split(split)) => {
                let dim = dim_of(path, tensor, *split)?;
                let rows = tensor.dims()[dim];
                if rows == 0 {
                    let reason = format!("{path}: {value} has no rows along dim {dim} to cut into chunks");
                    return Err(Error::Microbatches(reason));
                }
                self.0.push(Some(ValueCut { path: path.clone(), dim, rows }));
            }
            (Value::Tensor(_), ChunkSpec::Replicate) => self.0.push(None),
            #[cfg(feature = "shard")]
            (Value::DTensor(_), ChunkSpec::Replicate) => self.0.push(None),
            #[cfg(feature = "shard")]
            (Value::DTensor(_), ChunkSpec::Split(_)) => {
                return Err(Error::Microbatches(format!(
                    "{path} is {value}, a sharded tensor, which is not cut; use Replicate, or give a plain tensor that nodes shard"
                )));
            }
            (_, ChunkSpec::Replicate) => {}
            (_, ChunkSpec::Split(_)) if covered => {}
            (_, ChunkSpec::Split(_)) => {
                let kind = value.kind();
                return Err(Error::Microbatches(format!(
                    "{path} is {kind} and cannot be cut by {spec}; use Replicate"
                )));
            }
            _ => {
                let reason =
                    format!("{path}: {spec} joins outputs and cannot cut; use TensorChunkSpec or Replicate");
                return Err(Error::Microbatches(reason));
            }
        }
        Ok(())
    }
}

impl ValueCut {
    /// Returns one of `chunks` pieces: a view of its rows, or if `masked` the whole tensor with zeros in all other
    /// rows.
    pub(super) fn piece(&self, tensor: &Tensor, chunks: usize, chunk: usize, masked: bool) -> Result<Tensor> {
        let rows = chunk_range(self.rows, chunks, chunk);
        let piece = tensor.narrow(self.dim, rows.start, rows.len())?;
        Ok(if masked { piece.pad_with_zeros(self.dim, rows.start, self.rows - rows.end)? } else { piece })
    }
}

/// Returns the dim that a spec names in a tensor, or an error with the path.
pub(super) fn dim_of(path: &ValuePath, tensor: &Tensor, spec: TensorChunkSpec) -> Result<usize> {
    spec.resolve(tensor.rank()).ok_or_else(|| {
        let value = Value::from(tensor);
        Error::Microbatches(match tensor.rank() {
            0 => {
                format!("{path}: {value} has no dims, so {spec} does not fit; use Replicate, or a reducer for outputs")
            }
            rank => format!("{path}: {spec} is outside {value}, whose dims are -{rank} to {}", rank - 1),
        })
    })
}

/// Returns an error unless there is a spec for each value and a value for each spec.
pub(super) fn check_steps(
    path: &ValuePath,
    values: &Children<'_, Value>,
    specs: &Children<'_, ChunkSpec>,
) -> Result<()> {
    if let Some((step, _)) = values.iter().find(|(step, _)| specs.iter().all(|(other, _)| other != step)) {
        let path = path.step(*step);
        return Err(Error::Microbatches(format!("{path} has no chunk spec; give it one, or Replicate")));
    }
    match specs.iter().find(|(step, _)| values.iter().all(|(other, _)| other != step)) {
        Some((step, spec)) => {
            let path = path.step(*step);
            Err(Error::Microbatches(format!("there is a chunk spec {spec} for {path}, but no such value")))
        }
        None => Ok(()),
    }
}

/// Returns the error for a leaf whose spec is a container.
pub(super) fn unlike(path: &ValuePath, value: &Value, spec: &ChunkSpec) -> Error {
    Error::Microbatches(format!("{path} is {}, but its chunk spec is {spec}; give one spec", value.kind()))
}
