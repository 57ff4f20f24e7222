//! Tensors in safetensors and GGUF files, from which each rank reads only its own block.
mod dtypes;
mod entry;
mod file;
mod gguf;
mod header;
mod indexed;
mod names;
mod quantized;
mod read;
mod runs;
mod schemes;
mod write;

pub(crate) use dtypes::{name_of, named as dtype_named};
pub(crate) use file::WeightFile;
pub(crate) use schemes::StoredCodes;
pub(crate) use write::{WeightWriter, is_reserved};

use crate::files::regular;
use crate::layout::{RowsOf, Spec};
use crate::{DTensor, Error, Result};
use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Device, Tensor};
use candle_dist::bits::digest_bytes;
use entry::{Entry, elements};
use gguf::types::Storage;
use schemes::SchemePiece;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Named tensors in safetensors files: one file, several, a model with a Hugging Face index, or a
/// [`checkpoint`](crate::checkpoint); or in a GGUF file, which may be quantized.
///
/// Files that [`checkpoint`](crate::checkpoint) has written have a digest of each MiB, and what is read is compared with it: whole MiBs are
/// read for that.
///
/// Opening reads only the headers. Each rank opens the files itself and reads its shards: whatever the dim, the number
/// of axes that cut it and the sizes, it reads the bytes of its block and few others.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{Result, Shard, Spec, Weights};
///
/// let path = std::env::temp_dir().join(format!("weights-doc-{}.safetensors", std::process::id()));
/// Tensor::arange(0f32, 4096., &Device::Cpu)?.reshape((2, 2048))?.save_safetensors("w", &path)?;
/// let bytes = World::threads(2).run(|ctx| -> Result<u64> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let weights = Weights::open(&path)?;
///     let w = weights.read("w", &Spec::new(&mesh, &[Shard(1)], (2, 2048), DType::F32)?, &Device::Cpu)?;
///     assert_eq!(w.to_local().to_vec2::<f32>()?[1][0], 2048. + 1024. * ctx.rank() as f32);
///     Ok(weights.bytes_read())
/// })?;
/// assert_eq!(bytes, [2 * 1024 * 4, 2 * 1024 * 4]);
/// std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Weights {
    /// The path that was opened, for messages.
    source: PathBuf,
    files: Vec<WeightFile>,
    tensors: BTreeMap<String, StoredTensor>,
    bytes_read: AtomicU64,
    /// What tells a checkpoint from others at the same place.
    identity: Option<u64>,
    fingerprint: OnceLock<u64>,
}

/// A tensor as stored in files.
#[derive(Clone)]
struct StoredTensor {
    shape: Vec<usize>,
    /// The dtype as named in the file.
    dtype: String,
    pieces: Vec<FileBlock>,
    /// What is computed from other tensors, as f32.
    schemes: Vec<SchemePiece>,
}

/// The files and the offsets of the pieces of a tensor, and of the codes that it is computed from with its first row and column there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TensorPlace(Vec<(usize, u64)>, Vec<[usize; 2]>);

/// A block of a tensor that lies in one file, row-major.
#[derive(Clone)]
struct FileBlock {
    file: usize,
    block: Vec<Range<usize>>,
    /// The offset of its bytes in the file.
    at: u64,
}

impl Weights {
    /// Opens several files without tensor names in common: safetensors files, or the GGUF files of one model.
    ///
    /// # Errors
    /// Those of [`open`](Self::open), if two files contain a tensor of the same name, and if the GGUF files of a model are
    /// not whole or in another order.
    pub fn open_files<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let Some(first) = paths.first() else {
            return Err(Error::file("", "no files were named; name at least one"));
        };
        let mut weights = Self::empty(first.as_ref());
        for path in paths {
            let file = WeightFile::open(path.as_ref())?;
            let at = weights.files.len();
            for (name, entry) in &file.entries {
                if let Some(known) = weights.tensors.insert(name.clone(), StoredTensor::whole(at, entry)) {
                    let other = weights.files[known.pieces[0].file].path.display();
                    let reason = format!("{name:?} is in {other} too; name files without tensors in common");
                    return Err(Error::file(path, reason));
                }
            }
            weights.files.push(file);
        }
        let parts: Vec<_> =
            weights.files.iter().map(|file| (file.metadata.as_ref(), file.entries.len())).collect();
        for (at, file) in weights.files.iter().enumerate() {
            gguf::split::check(&parts, at).map_err(|why| Error::file(&file.path, why))?;
        }
        Ok(weights)
    }

    fn empty(source: &Path) -> Self {
        let (source, bytes_read) = (source.into(), AtomicU64::new(0));
        Self {
            source,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            bytes_read,
            identity: None,
            fingerprint: OnceLock::new(),
        }
    }

    /// Returns a number that tells a checkpoint from others at the same place; `None` if it is none.
    pub(crate) fn identity(&self) -> Option<u64> {
        self.identity
    }

    /// Returns a number that tells the tensors of the files from others with the same names, by all bytes of what
    /// [`checkpoint`](crate::checkpoint) has written, and by the first ones of other tensors.
    ///
    /// Hosts with copies of one model have the same number, also if the copies cut it into files in other ways.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn fingerprint(&self) -> Result<u64> {
        if let Some(known) = self.identity.or_else(|| self.fingerprint.get().copied()) {
            return Ok(known);
        }
        let mut all = Vec::new();
        for file in &self.files {
            all.extend(file.traits()?);
        }
        all.sort_unstable();
        Ok(*self.fingerprint.get_or_init(|| digest_bytes(&all.concat())))
    }

    /// Returns the names of the tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns whether there is a tensor of this name.
    pub fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the global shape of a tensor.
    ///
    /// # Errors
    /// If there is no tensor of this name.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.stored(name)?.shape)
    }

    /// Returns whether the header of a GGUF file goes on behind its first `bytes` bytes, as far as these tell. For those who have no more
    /// of the file yet.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read.
    pub fn gguf_header_goes_on(path: impl AsRef<Path>, bytes: u64) -> Result<bool> {
        let path = path.as_ref();
        let file =
            regular::open(path).map_err(|error| Error::file(path, format!("cannot be read ({error})")))?;
        Ok(gguf::goes_on(file, bytes))
    }

    /// Returns the metadata of a GGUF file by name; `None` for other files.
    pub fn metadata(&self) -> Option<&BTreeMap<String, Value>> {
        self.files.iter().find_map(|file| file.metadata.as_ref())
    }

    /// Returns the stored dtype of a tensor; f32 for quantized ones, which are read as that.
    ///
    /// # Errors
    /// If there is no tensor of this name, or candle does not support its dtype.
    pub fn dtype(&self, name: &str) -> Result<DType> {
        let stored = self.stored(name)?;
        let dtype = dtypes::named(&stored.dtype).or(stored.quantized().map(|_| DType::F32));
        dtype.ok_or_else(|| {
            let (known, dtype) = (dtypes::known(), &stored.dtype);
            self.error(
                name,
                format!("has the dtype {dtype}, which cannot be loaded; convert it to one of {known}"),
            )
        })
    }

    /// Returns the type in which a tensor is stored, as its file names it, such as `BF16`, `Q4_K` or `F8_E4M3`, and the bytes that it takes
    /// there. The type of a [quantized layer](Self::dequantize) is that of its codes, and the bytes are those of scales, too.
    ///
    /// # Errors
    /// If there is no tensor of this name.
    pub fn stored_as(&self, name: &str) -> Result<(&str, u64)> {
        let stored = self.stored(name)?;
        let dtype = stored.schemes.first().map_or(&stored.dtype, |piece| &piece.scheme.codes().dtype);
        Ok((dtype, stored.all_bytes()))
    }

    /// Reads this rank's block of a tensor in the layout `spec`, cast to its dtype.
    ///
    /// # Errors
    /// If there is no tensor of this name, if its shape is not the spec's, or if its dtype cannot be cast to the
    /// spec's: floats are cast to floats, other dtypes must be equal. These errors are equal on all ranks. On this rank
    /// alone, if the file cannot be read.
    pub fn read(&self, name: &str, spec: &Spec, device: &Device) -> Result<DTensor> {
        self.read_part(name, None, spec, device)
    }

    /// Like [`read`](Self::read), but if there is no tensor of this name, reads it from the larger tensor `within`.
    pub(crate) fn read_part(
        &self,
        name: &str,
        within: Option<&RowsOf>,
        spec: &Spec,
        device: &Device,
    ) -> Result<DTensor> {
        let local = match within.filter(|_| !self.contains_tensor(name)) {
            Some(within) => {
                self.read_as(&within.of, &within.whole(spec), &within.block(spec), spec.dtype(), device)?
            }
            None => self.read_as(name, spec.dims(), &spec.local_block(), spec.dtype(), device)?,
        };
        DTensor::from_local_with_spec(local, spec.clone())
    }

    /// Reads a block of a tensor that must have the shape `want`, cast to `to`.
    fn read_as(
        &self,
        name: &str,
        want: &[usize],
        block: &[Range<usize>],
        to: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let (shape, dtype) = (self.shape(name)?, self.dtype(name)?);
        if shape != want {
            return Err(self.error(
                name,
                format!("has shape {shape:?}, but the model expects {want:?}; check the model's sizes"),
            ));
        }
        if dtype != to && !(dtype.is_float() && to.is_float()) {
            let (has, want) = (dtype.as_str(), to.as_str());
            return Err(self.error(
                name,
                format!(
                    "holds {has}, but the model expects {want}; only floats are cast, and only to floats"
                ),
            ));
        }
        Ok(self.read_block(name, block, device)?.to_dtype(to)?)
    }

    /// Reads a block of a tensor, one range of global indices per dim, in the [dtype](Self::dtype) of the tensor.
    ///
    /// # Errors
    /// If there is no tensor of this name, if the block is outside of it, or if the file cannot be read.
    pub fn read_block(&self, name: &str, block: &[Range<usize>], device: &Device) -> Result<Tensor> {
        let (stored, dtype) = (self.stored(name)?, self.dtype(name)?);
        let inside = |(range, &n): (&Range<usize>, &usize)| range.start <= range.end && range.end <= n;
        if block.len() != stored.shape.len() || !block.iter().zip(&stored.shape).all(inside) {
            let shape = &stored.shape;
            return Err(
                self.error(name, format!("has shape {shape:?}, and the block {block:?} is outside of it"))
            );
        }
        if let Some(storage) = stored.quantized() {
            return self.read_dequantized(name, stored, storage, block, device);
        }
        if elements(&stored.shape).is_none() {
            return Err(
                self.error(name, format!("has shape {:?}, more than memory can address", stored.shape))
            );
        }
        read::filled(dtype, block, device, |bytes| {
            for piece in &stored.pieces {
                let runs = runs::ByteRuns::new(&piece.block, block, dtype.size_in_bytes());
                let read = read::read(&self.files[piece.file], piece.at, runs, bytes);
                self.bytes_read.fetch_add(read.map_err(|error| named(name, error))?, Ordering::Relaxed);
            }
            for piece in &stored.schemes {
                piece.write(self, block, bytes).map_err(|error| named(name, error))?;
            }
            Ok(())
        })
    }

    /// Reads all files that have digests, and compares them. What was written by [`checkpoint`](crate::checkpoint) has digests;
    /// reads of tensors compare those of what they read.
    ///
    /// # Errors
    /// If a file is not as it was written, or cannot be read.
    pub fn verify(&self) -> Result<()> {
        self.files.iter().try_for_each(WeightFile::verify)
    }

    /// Returns the number of bytes of tensors that were read so far, without headers and indices.
    ///
    /// They include gaps between rows where skipping would take longer than reading.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Returns where a tensor is, whatever its name.
    ///
    /// # Errors
    /// If there is no tensor of this name.
    pub(crate) fn place(&self, name: &str) -> Result<TensorPlace> {
        let stored = self.stored(name)?;
        let codes = stored.schemes.iter().flat_map(|piece| &piece.scheme.codes().pieces);
        let pieces = stored.pieces.iter().chain(codes).map(|piece| (piece.file, piece.at));
        Ok(TensorPlace(pieces.collect(), stored.schemes.iter().map(|piece| piece.start).collect()))
    }

    fn stored(&self, name: &str) -> Result<&StoredTensor> {
        self.tensors.get(name).ok_or_else(|| {
            let last = name.rsplit('.').next().unwrap_or(name);
            let like = self.names().find(|known| known.rsplit('.').next() == Some(last));
            let like = like.map(|known| format!(", such as {known:?}")).unwrap_or_default();
            let n = self.tensors.len();
            self.error(name, format!("is not there; check the prefix against the {n} names that are{like}"))
        })
    }

    fn error(&self, name: &str, reason: impl fmt::Display) -> Error {
        let piece = self.tensors.get(name).and_then(|stored| stored.pieces.first());
        let path = piece.map_or(&self.source, |piece| &self.files[piece.file].path);
        Error::file(path, format!("{name:?} {reason}"))
    }
}

/// Adds the name of a tensor to the error of its file.
fn named(name: &str, error: Error) -> Error {
    match error {
        Error::File { path, reason } => Error::File { path, reason: format!("{name:?}: {reason}") },
        error => error,
    }
}

impl StoredTensor {
    /// Creates an entry for a tensor that lies whole in one file.
    fn whole(file: usize, entry: &Entry) -> Self {
        let block = entry.shape.iter().map(|&n| 0..n).collect();
        let pieces = vec![FileBlock { file, block, at: entry.at }];
        Self { shape: entry.shape.clone(), dtype: entry.dtype.clone(), pieces, schemes: Vec::new() }
    }

    /// Returns the bytes of all that it consists of, in its files.
    fn all_bytes(&self) -> u64 {
        self.byte_count() + self.schemes.iter().map(SchemePiece::byte_count).sum::<u64>()
    }

    /// Returns the bytes of the pieces in their files.
    fn byte_count(&self) -> u64 {
        let (elements, bits) = match self.quantized().map(Storage::block) {
            Some((elements, bytes)) => (elements, 8 * bytes),
            None => (1, dtypes::bits(&self.dtype)),
        };
        let count = |piece: &FileBlock| elements_of(&piece.block) / elements as u64;
        self.pieces.iter().map(count).sum::<u64>().saturating_mul(bits as u64).div_ceil(8)
    }
}

/// Returns the number of elements of a block that lies in a file.
fn elements_of(block: &[Range<usize>]) -> u64 {
    block.iter().fold(1, |count: u64, range| count.saturating_mul(range.len() as u64))
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (source, n, read) = (self.source.display(), self.tensors.len(), self.bytes_read());
        write!(f, "Weights({source}, {n} tensors, {read} bytes read)")
    }
}
