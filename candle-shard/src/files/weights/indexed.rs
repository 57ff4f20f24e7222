//! Weights in several files, located by an index file.
use super::entry::{Entry, elements};
use super::file::WeightFile;
use super::{FileBlock, StoredTensor, Weights, gguf};
use crate::files::index::{self, INDEX, IndexFile, TensorIndex};
use crate::layout::{first_overlap, volume};
use crate::{Error, Result};
use candle_dist::bits::digest_bytes;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The file names that a folder of weights may contain.
const KNOWN: [&str; 3] = [INDEX, SEVERAL, SINGLE];
const SEVERAL: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

impl Weights {
    /// Opens a safetensors or GGUF file, an index of several files (`model.safetensors.index.json`), or a folder with
    /// either or with a [`checkpoint`](crate::checkpoint). Any of the GGUF files of a model
    /// (`PREFIX-00001-of-00003.gguf`) opens all of them.
    ///
    /// # Errors
    /// [`Error::File`] if a file is missing, truncated or damaged, or if an index and the files disagree.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            return open_folder(path);
        }
        match path.extension().is_some_and(|extension| extension == "json") {
            true => open_index(path),
            false => Self::open_files(&Self::gguf_files(path)),
        }
    }

    /// Returns the paths of all GGUF files of a model, in their order, if one of them has a name such as
    /// `PREFIX-00002-of-00003.gguf`; otherwise this path alone.
    ///
    /// ```
    /// use candle_shard::Weights;
    ///
    /// assert_eq!(Weights::gguf_files("m/x-00002-of-00002.gguf")[0].to_str(), Some("m/x-00001-of-00002.gguf"));
    /// assert_eq!(Weights::gguf_files("m/x.gguf").len(), 1);
    /// ```
    pub fn gguf_files(path: impl AsRef<Path>) -> Vec<PathBuf> {
        let path = path.as_ref();
        gguf::split::paths(path).unwrap_or_else(|| vec![path.into()])
    }
}

fn open_folder(folder: &Path) -> Result<Weights> {
    let at = |name: &str| Some(folder.join(name)).filter(|path| path.exists());
    let single = at(SINGLE);
    // If the index does not name the single file, an earlier save has left the index. transformers reads the single file, too.
    let several = at(SEVERAL).filter(|path| single.is_none() || names_single(path).unwrap_or_default());
    match at(INDEX).or(several).or(single) {
        Some(path) => Weights::open(path),
        None => {
            Err(Error::file(folder, format!("holds none of {}; name the files themselves", KNOWN.join(", "))))
        }
    }
}

/// Returns whether an index has [`SINGLE`] among its files.
fn names_single(path: &Path) -> Result<bool> {
    let index = IndexFile::parse(path, &index::read(path)?)?;
    Ok(matches!(index, IndexFile::Whole(files) if files.values().any(|file| file == SINGLE)))
}

/// How often an index is read again that another job replaces at this moment.
const TRIES: usize = 100;

fn open_index(path: &Path) -> Result<Weights> {
    let mut text = index::read(path)?;
    for _ in 0..TRIES {
        let opened = open_text(path, &text);
        let Err(error) = opened else { return opened };
        // A save that replaces the checkpoint removes the files of the last one.
        let now = index::read(path)?;
        if now == text {
            return Err(error);
        }
        text = now;
    }
    Err(Error::file(path, "is replaced all the time by other processes; try again"))
}

fn open_text(path: &Path, text: &[u8]) -> Result<Weights> {
    let checkpoint = match IndexFile::parse(path, text)? {
        IndexFile::Blocks(checkpoint) => checkpoint,
        IndexFile::Whole(files) => return open_whole(path, files),
    };
    let is_intact = checkpoint.is_intact();
    let mut files = FileSet::new(path);
    for (name, stamp) in &checkpoint.files {
        let at = files.open(name)?;
        let file = &files.weights.files[at];
        if file.stamp().as_ref() != Some(stamp) {
            let reason = format!(
                "is not the file that {} names, or is damaged; get both from one source",
                path.display()
            );
            return Err(Error::file(&file.path, reason));
        }
    }
    for (name, indexed) in checkpoint.tensors {
        let stored = files.pieces_of(&name, indexed)?;
        files.weights.tensors.insert(name, stored);
    }
    if !is_intact {
        return Err(Error::file(path, "is not as it was written; it is damaged, take another copy of it"));
    }
    files.weights.identity = Some(digest_bytes(text));
    Ok(files.weights)
}

fn open_whole(path: &Path, weight_map: BTreeMap<String, String>) -> Result<Weights> {
    let mut files = FileSet::new(path);
    for (name, file) in weight_map {
        let at = files.open(&file)?;
        let stored = StoredTensor::whole(at, files.entry(&name, at)?);
        files.weights.tensors.insert(name, stored);
    }
    Ok(files.weights)
}

/// The files that an index names, each opened once.
struct FileSet<'a> {
    index: &'a Path,
    opened: BTreeMap<String, usize>,
    weights: Weights,
}

impl<'a> FileSet<'a> {
    fn new(index: &'a Path) -> Self {
        Self { index, opened: BTreeMap::new(), weights: Weights::empty(index) }
    }

    fn open(&mut self, name: &str) -> Result<usize> {
        if let Some(&at) = self.opened.get(name) {
            return Ok(at);
        }
        // An index must not refer to files outside its folder.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(Error::file(
                self.index,
                format!("names {name:?}, which is not a file in its folder"),
            ));
        }
        self.weights.files.push(WeightFile::open(&self.index.with_file_name(name))?);
        let at = self.weights.files.len() - 1;
        self.opened.insert(name.into(), at);
        Ok(at)
    }

    fn entry(&self, name: &str, file: usize) -> Result<&Entry> {
        let file = &self.weights.files[file];
        file.entries.get(name).ok_or_else(|| {
            let index = self.index.display();
            Error::file(
                &file.path,
                format!("{name:?} is not there, though {index} says so; get both from one source"),
            )
        })
    }

    /// Opens the pieces of one tensor and checks them: each lies in its file as described, and together they are the
    /// tensor.
    fn pieces_of(&mut self, name: &str, indexed: TensorIndex) -> Result<StoredTensor> {
        let TensorIndex { shape, dtype, pieces } = indexed;
        let mut stored = StoredTensor { shape, dtype, pieces: Vec::new(), schemes: Vec::new() };
        for piece in pieces {
            let file = self.open(&piece.file)?;
            let entry = self.entry(name, file)?;
            let dims = stored.shape.len();
            let lies = entry.shape == piece.shape && piece.shape.len() == dims && piece.start.len() == dims;
            if !lies || entry.dtype != stored.dtype {
                let (has, want, start, whole) = (&entry.shape, &piece.shape, &piece.start, &stored.shape);
                let reason =
                    format!("{name:?} is {}{has:?}, and the index has {}{want:?}", entry.dtype, stored.dtype);
                let reason = format!("{reason} at {start:?} of {whole:?}");
                return Err(Error::file(&self.weights.files[file].path, reason));
            }
            let block =
                piece.start.iter().zip(&piece.shape).map(|(&at, &n)| at..at.saturating_add(n)).collect();
            stored.pieces.push(FileBlock { file, block, at: entry.at });
        }
        match stored.covered() {
            true => Ok(stored),
            false => {
                let shape = &stored.shape;
                Err(Error::file(
                    self.index,
                    format!("the pieces of {name:?} are not exactly a tensor of shape {shape:?}"),
                ))
            }
        }
    }
}

impl StoredTensor {
    /// Returns whether each element is in exactly one piece: the counts match, all pieces are inside, none overlap.
    fn covered(&self) -> bool {
        let volumes =
            self.pieces.iter().try_fold(0, |sum: usize, piece| sum.checked_add(volume(&piece.block)?));
        let inside =
            |piece: &FileBlock| piece.block.iter().zip(&self.shape).all(|(range, &n)| range.end <= n);
        let blocks: Vec<_> = self.pieces.iter().map(|piece| &piece.block).collect();
        self.pieces.iter().all(inside)
            && volumes.is_some()
            && volumes == elements(&self.shape)
            && first_overlap(&blocks).is_none()
    }
}
