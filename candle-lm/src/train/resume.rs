//! Going on from a checkpoint.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_core::DType;
use candle_shard::Weights;
use candle_shard::regular;
use serde::{Deserialize, Serialize};

use super::corpus::Stamp;
use super::loop_state::LoopState;
use super::recipe::Recipe;
use super::{base, folder, local, stage_files};
use crate::adapter::{self, AdapterConfig};
use crate::config::Config;
use crate::dtype::DTypeName;
use crate::files::{Files, check};

/// The file with what a checkpoint keeps beside tensors.
pub(super) const STATE: &str = "training.json";

/// The name of the folder with the optimizer's state, and of the files in it.
pub(super) const OPTIMIZER: &str = "optimizer";

/// How far a training is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// The steps that were made, which is also where the batches go on.
    pub step: usize,
    /// The text that they were made on.
    pub text: Stamp,
    /// The model that the adapter changes, if it is an adapter that is trained.
    #[serde(default)]
    pub base: Option<Stamp>,
    /// How.
    pub recipe: Recipe,
    /// The loop.
    #[serde(default)]
    pub progress: LoopState,
}

/// The former name of [`TrainState`].
#[deprecated(since = "0.1.0", note = "renamed to TrainState")]
pub type State = TrainState;

/// A checkpoint, found to be whole.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its folder, which is that of a model too.
    pub folder: PathBuf,
    /// The model.
    pub files: Files,
    /// The adapter, if it is one of an adapter.
    pub lora: Option<AdapterConfig>,
    /// How far it is.
    pub state: TrainState,
    /// What the user should know of the model that the adapter changes.
    pub notes: Vec<String>,
    /// Later checkpoints beside it that are not whole.
    pub skipped: Vec<Flaw>,
}

/// A folder with the name of a checkpoint that is not whole.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Flaw {
    /// The folder.
    pub folder: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

impl Checkpoint {
    /// Opens a checkpoint, or the last one in a folder of them that is whole, without what the fields `ignored` of its config say. To find
    /// it, its tensors are read once, and compared with their digests. Those of a checkpoint that is given by itself are compared when
    /// they are loaded.
    ///
    /// An adapter changes the model at `base`, or without a path the one that its config names.
    ///
    /// # Errors
    /// If there is none, a file cannot be read, or its config is refused. If the model that the config of an adapter names is not the one
    /// that it was trained on. If the checkpoint that is given by itself is not whole: a file is
    /// missing, cut short or damaged, or a tensor is not there, or not in the shape and dtype that it should have. The file and the
    /// tensor are named.
    pub fn open(path: &Path, base: Option<&Path>, ignored: &[String]) -> Result<Self> {
        if path.join(STATE).exists() {
            return Self::of(path.to_owned(), base, ignored);
        }
        let mut skipped = Vec::new();
        for folder in folder::checkpoints(path)? {
            match Self::of(folder.clone(), base, ignored).and_then(Self::verified) {
                Ok(resumed) => return Ok(Self { skipped, ..resumed }),
                Err(error) => {
                    check_readable(&folder, base, ignored)?;
                    skipped.push(Flaw { folder, reason: format!("{error:#}") });
                }
            }
        }
        let advice = "give the folder of an earlier --save";
        let shown = path.display();
        match skipped.into_iter().next() {
            None => bail!("{shown}: holds no checkpoint; {advice}"),
            Some(Flaw { folder, reason }) => {
                bail!("{shown}: holds no checkpoint that is whole; {}: {reason}", folder.display())
            }
        }
    }

    /// Opens the checkpoint in this folder, without what the fields `ignored` of its config say. Its tensors are compared with their
    /// digests when they are loaded.
    ///
    /// # Errors
    /// Those of [`open`](Self::open) for a checkpoint that is given by itself.
    pub fn of(folder: PathBuf, base: Option<&Path>, ignored: &[String]) -> Result<Self> {
        let at = folder.join(STATE);
        let text = regular::read_text(&at, regular::CONFIG).with_context(|| format!("{}", at.display()))?;
        let state: TrainState = serde_json::from_str(&text).with_context(|| format!("{}", at.display()))?;
        let mut notes = Vec::new();
        let (files, lora) = if folder.join(adapter::CONFIG).is_file() {
            let (files, config) = open_base(&folder, base, ignored, &state, &mut notes)?;
            (files.with_adapter(adapter::TRAINED, &folder)?, Some(config))
        } else {
            (Files::open_without(&folder, ignored)?, None)
        };
        files.tokenizer()?;
        let resumed = Self { folder, files, lora, state, notes, skipped: Vec::new() };
        let mut tensors = match &resumed.lora {
            Some(config) => adapter::tensors(adapter::TRAINED, config, &resumed.files)?,
            None => resumed.files.config.learned(),
        };
        tensors.retain(|(name, _)| !resumed.state.recipe.freeze.contains(name));
        check_optimizer(&resumed.optimizer(), &tensors, resumed.state.recipe.dtype)?;
        local::check_files(&resumed.folder, &tensors, &resumed.state.recipe)?;
        Ok(resumed)
    }

    /// Reads the tensors, and compares them with their digests.
    fn verified(self) -> Result<Self> {
        match &self.lora {
            None => self.files.weights.verify()?,
            Some(_) => Weights::open(self.folder.join(adapter::WEIGHTS))?.verify()?,
        }
        Weights::open(self.optimizer())?.verify()?;
        local::files(&self.folder, &self.state.recipe)
            .iter()
            .try_for_each(|at| Weights::open(at)?.verify())?;
        Ok(self)
    }

    /// The file with the optimizer's state.
    pub fn optimizer(&self) -> PathBuf {
        stage_files::source(&self.folder.join(OPTIMIZER), OPTIMIZER)
    }
}

/// Opens the model at `given`, or else the one that the config of the adapter in `folder` names; returns the config with that path.
fn open_base(
    folder: &Path,
    given: Option<&Path>,
    ignored: &[String],
    state: &TrainState,
    notes: &mut Vec<String>,
) -> Result<(Files, AdapterConfig)> {
    let mut config = AdapterConfig::read(folder)?;
    let (shown, file) = (folder.display(), adapter::CONFIG);
    let named = config.base.as_deref().map(Path::new);
    let path = given
        .or(named)
        .with_context(|| format!("{shown}: {file} does not say which model it changes; give --model"))?;
    let files = Files::open_without(path, ignored).with_context(|| match given {
        Some(_) => format!("the model of --model, which {shown} is to change"),
        None => format!("the model that {shown} changes, which {file} names; --model names another place"),
    })?;
    if let Some(known) = state.base
        && base::stamp(&files)? != known
    {
        let path = path.display();
        match given {
            Some(_) => {
                notes.push(format!("{path} is another model than the one that {shown} was trained on"));
            }
            None => bail!(
                "{path}, which the {file} of {shown} names, is not the model that the adapter was trained on; give that one by --model, or \
                 {path} to go on with it"
            ),
        }
    }
    // The checkpoint is read from other folders too.
    let absolute = given.and_then(|given| fs::canonicalize(given).ok());
    config.base = Some(absolute.as_deref().unwrap_or(path).to_string_lossy().into_owned());
    Ok((files, config))
}

/// Checks that the files of a checkpoint that is not whole can be read, and that its config is not refused: these are no damage, and the
/// checkpoint may be good.
fn check_readable(folder: &Path, base: Option<&Path>, ignored: &[String]) -> Result<()> {
    if !folder.join(STATE).exists() {
        return Ok(());
    }
    let replicas = (1..).map(|replica| local::folder_of(folder, replica)).take_while(|at| at.exists());
    for at in
        [folder.to_owned(), folder.join(OPTIMIZER), folder.join(local::OUTER)].into_iter().chain(replicas)
    {
        let entries = match fs::read_dir(&at) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            entries => entries.with_context(|| format!("{}", at.display()))?,
        };
        for entry in entries {
            let path = entry.with_context(|| format!("{}", at.display()))?.path();
            if path.is_file() {
                let read = || io::copy(&mut regular::open(&path)?, &mut io::sink());
                read().with_context(|| format!("{}", path.display()))?;
            }
        }
    }
    let config = fs::read(folder.join("config.json")).unwrap_or_default();
    if serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&config).is_ok() {
        Config::read(folder, ignored)?;
    }
    // An adapter whose config is refused, or whose model cannot be opened, is no damage either.
    if folder.join(adapter::CONFIG).is_file() {
        let state = fs::read(folder.join(STATE)).unwrap_or_default();
        if let Ok(state) = serde_json::from_slice::<TrainState>(&state) {
            let mut notes = Vec::new();
            let (files, config) = open_base(folder, base, ignored, &state, &mut notes)?;
            if let Some(note) = notes.first() {
                let fits = adapter::tensors(adapter::TRAINED, &config, &files)
                    .and_then(|_| files.with_adapter(adapter::TRAINED, folder));
                fits.with_context(|| format!("{note}, and the adapter does not fit it"))?;
            }
        }
    }
    Ok(())
}

/// Checks by the headers that a file has the optimizer's state of all these parameters.
pub(super) fn check_optimizer(at: &Path, tensors: &[(String, Vec<usize>)], dtype: DTypeName) -> Result<()> {
    let weights = Weights::open(at)?;
    let kept = ["first_moment", "second_moment", "master_weight"];
    let kept = if dtype == DTypeName::F32 { &kept[..2] } else { &kept[..] };
    for (name, want) in tensors {
        for which in kept {
            check(&weights, at, &format!("adam_w.{which}.{name}"), want, Some(DType::F32))?;
        }
        check(&weights, at, &format!("adam_w.step.{name}"), &[], Some(DType::U32))?;
    }
    Ok(())
}
