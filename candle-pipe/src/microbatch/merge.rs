//! Joins the results of chunks.
use super::cut::{check_steps, dim_of, unlike};
use super::{ChunkSpec, TensorChunkSpec};
use crate::{Error, Result, Value, ValuePath};
use candle_core::Tensor;

/// Joins the results of chunks: tensors along their spec's dim, losses and others by their reducer.
///
/// Values under [`Replicate`](ChunkSpec::Replicate), and plain values without a spec, must be the same in every
/// chunk, tensors in every bit. Without a spec, tensors are joined along
/// [`DEFAULT_CHUNK_DIM`](super::DEFAULT_CHUNK_DIM). Structure, and the graph of equal values, are those of chunk 0.
/// Gradients of joined or summed values flow to every chunk.
///
/// # Errors
/// [`Error::Microbatches`], naming paths like `output[1].loss`, if
/// - there are no chunks, or they differ in structure, or from that of the spec,
/// - a tensor has no such dim (a scalar loss needs a [`LossReducer`](super::LossReducer)), or chunks differ in another
///   dim or the dtype,
/// - values that must be the same are not,
/// - a loss is not one floating-point number, or a mean whose weights are not known.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_pipe::Value;
/// use candle_pipe::microbatch::merge_chunks;
///
/// let chunk = |rows: usize| -> candle_pipe::Result<Value> {
///     Ok((Tensor::zeros((rows, 2), DType::F32, &Device::Cpu)?, "same").into())
/// };
/// assert_eq!(merge_chunks(&[chunk(3)?, chunk(2)?], None)?.to_string(), r#"(f32[5, 2], "same")"#);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
pub fn merge_chunks(chunks: &[Value], spec: Option<&ChunkSpec>) -> Result<Value> {
    Merge { weights: None, masked: None }.all(chunks, spec)
}

/// Known properties of the chunks.
pub(super) struct Merge<'a> {
    /// Their shares of the batch.
    pub(super) weights: Option<&'a [f64]>,
    /// Their rows, if each has the whole batch's shape.
    pub(super) masked: Option<&'a [usize]>,
}

impl Merge<'_> {
    pub(super) fn all(&self, chunks: &[Value], spec: Option<&ChunkSpec>) -> Result<Value> {
        if chunks.is_empty() {
            return Err(Error::Microbatches("there are no chunks to join; give at least one".into()));
        }
        let chunks: Vec<&Value> = chunks.iter().collect();
        self.one(&ValuePath::new("output"), &chunks, spec.unwrap_or(&ChunkSpec::DEFAULT), spec.is_none())
    }

    /// `covered`: the spec is that of a container around the value, or the default.
    fn one(&self, path: &ValuePath, chunks: &[&Value], spec: &ChunkSpec, covered: bool) -> Result<Value> {
        match spec {
            ChunkSpec::Reduce(reducer) => return reducer.reduce(chunks),
            ChunkSpec::Loss(reducer) => return reducer.reduce(path, chunks, self.weights),
            _ => {}
        }
        check_structure(path, chunks)?;
        let Some(first) = chunks[0].children() else { return self.leaf(path, chunks, spec, covered) };
        let specs = spec.children();
        if let Some(specs) = &specs {
            check_steps(path, &first, specs)?;
        }
        let lists: Vec<_> = chunks.iter().filter_map(|chunk| chunk.children()).collect();
        let children = first.iter().enumerate().map(|(k, (step, _))| {
            let values: Vec<&Value> = lists.iter().map(|list| list[k].1).collect();
            let (spec, covered) = specs.as_ref().map_or((spec, true), |specs| (specs[k].1, false));
            self.one(&path.step(*step), &values, spec, covered)
        });
        Ok(chunks[0].with_children(children.collect::<Result<_>>()?))
    }

    fn leaf(&self, path: &ValuePath, chunks: &[&Value], spec: &ChunkSpec, covered: bool) -> Result<Value> {
        match (chunks[0], spec) {
            (Value::Tensor(_), ChunkSpec::Split(split)) => {
                let tensors = chunks.iter().map(|chunk| chunk.tensor()).collect::<Result<Vec<_>>>()?;
                Ok(self.join(path, &tensors, *split)?.into())
            }
            #[cfg(feature = "shard")]
            (Value::DTensor(_), ChunkSpec::Split(split)) => self.join_sharded(path, chunks, *split),
            (_, ChunkSpec::Replicate) => the_same(path, chunks),
            (_, ChunkSpec::Split(_)) if covered => the_same(path, chunks),
            (value, ChunkSpec::Split(_)) => {
                let kind = value.kind();
                Err(Error::Microbatches(format!(
                    "{path} is {kind} and cannot be joined by {spec}; use Replicate or a reducer"
                )))
            }
            (value, _) => Err(unlike(path, value, spec)),
        }
    }

    /// Concatenates sharded tensors along a dim.
    #[cfg(feature = "shard")]
    fn join_sharded(&self, path: &ValuePath, chunks: &[&Value], spec: TensorChunkSpec) -> Result<Value> {
        let tensors = chunks.iter().map(|chunk| chunk.dtensor()).collect::<Result<Vec<_>>>()?;
        let outside = || {
            let (value, rank) = (chunks[0], tensors[0].rank());
            Error::Microbatches(format!(
                "{path}: {value} has {rank} dims, so {spec} does not fit; use Replicate"
            ))
        };
        let dim = spec.resolve(tensors[0].rank()).ok_or_else(outside)?;
        if self.masked.is_some() {
            let reason =
                "a sharded output of masked chunks is not joined; gather it in the model with full_tensor";
            return Err(Error::Microbatches(format!("{path}: {reason}")));
        }
        Ok(candle_shard::DTensor::cat(&tensors, dim)?.into())
    }

    /// Concatenates tensors along a dim; of masked ones, the rows of the chunk.
    fn join(&self, path: &ValuePath, tensors: &[&Tensor], spec: TensorChunkSpec) -> Result<Tensor> {
        let dim = dim_of(path, tensors[0], spec)?;
        let (rule, free) = match self.masked {
            Some(_) => ("masked chunks have one shape".to_owned(), None),
            None => (format!("chunks may differ in dim {dim} alone"), Some(dim)),
        };
        if let Some(chunk) = tensors.iter().position(|tensor| !alike(tensor, tensors[0], free)) {
            let (this, first) = (Value::from(tensors[chunk]), Value::from(tensors[0]));
            return Err(Error::Microbatches(format!(
                "{path}: chunk {chunk} is {this}, chunk 0 is {first}; {rule}"
            )));
        }
        match self.masked {
            Some(rows) => Ok(Tensor::cat(&own_rows(path, tensors, dim, rows)?, dim)?),
            None => Ok(Tensor::cat(tensors, dim)?),
        }
    }
}

/// Returns whether dtypes are equal, and shapes except for one dim.
fn alike(a: &Tensor, b: &Tensor, except: Option<usize>) -> bool {
    let mut sizes = a.dims().iter().zip(b.dims()).enumerate();
    a.dtype() == b.dtype() && a.rank() == b.rank() && sizes.all(|(dim, (a, b))| a == b || except == Some(dim))
}

/// Returns each masked chunk's own rows, which may have several entries each.
fn own_rows(path: &ValuePath, tensors: &[&Tensor], dim: usize, rows: &[usize]) -> Result<Vec<Tensor>> {
    let (places, total) = (tensors[0].dims()[dim], rows.iter().sum::<usize>());
    if places % total != 0 {
        return Err(Error::Microbatches(format!(
            "{path}: masked chunks of {total} rows gave {} with {places} places along dim {dim}, which do not belong to \
             rows",
            Value::from(tensors[0])
        )));
    }
    let starts = rows.iter().scan(0, |start, rows| Some(std::mem::replace(start, *start + rows)));
    let of_row = places / total;
    tensors
        .iter()
        .zip(starts.zip(rows))
        .map(|(t, (start, rows))| Ok(t.narrow(dim, start * of_row, rows * of_row)?))
        .collect()
}

/// Checks that all chunks are leaves of one kind, or have values in the same places.
fn check_structure(path: &ValuePath, chunks: &[&Value]) -> Result<()> {
    let alike = |a: &Value, b: &Value| match (a.children(), b.children()) {
        (Some(a), Some(b)) => a.iter().map(|(step, _)| step).eq(b.iter().map(|(step, _)| step)),
        (None, None) => a.kind() == b.kind(),
        _ => false,
    };
    match chunks.iter().position(|chunk| !alike(chunk, chunks[0])) {
        None => Ok(()),
        Some(chunk) => Err(Error::Microbatches(format!(
            "{path}: chunk {chunk} is {}, chunk 0 is {}; chunks must have one structure",
            chunks[chunk], chunks[0]
        ))),
    }
}

/// Returns the value that all chunks share, or an error with the first that differs.
fn the_same(path: &ValuePath, chunks: &[&Value]) -> Result<Value> {
    for (chunk, value) in chunks.iter().enumerate() {
        if !value.same(chunks[0])? {
            let bits = if matches!(value, Value::Tensor(_)) { " (compared bit by bit)" } else { "" };
            return Err(Error::Microbatches(format!(
                "{path}: chunk {chunk} has {value}, chunk 0 has {}{bits}; it must be the same in every chunk, or have a \
                 TensorChunkSpec or reducer",
                chunks[0]
            )));
        }
    }
    Ok(chunks[0].clone())
}
