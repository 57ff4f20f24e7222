//! The flags of adapters.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Result;
use candle_lm::adapter::{AdapterConfig, TRAINED, TargetModules};
use candle_lm::files::Files;
use candle_shard::nn::LoraOptions;
use clap::Args;
use examples::cli::{Checked, require};
use itertools::Itertools;

use crate::train::args::TrainArgs;

/// The options of adapters; the comments on the fields are the program's help.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct AdapterArgs {
    /// Adapter to run with the model: a folder in PEFT's layout or a GGUF file of llama.cpp, perhaps with a name before it;
    /// what several change is added, and clients of a server choose one by its name. With train one that is trained on
    #[arg(long, value_name = "[NAME=]PATH")]
    pub adapter: Vec<AdapterPath>,
}

/// An adapter by its name and its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterPath {
    name: Option<String>,
    path: PathBuf,
}

impl FromStr for AdapterPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = match text.split_once('=') {
            // A path may have such a sign too.
            Some((name, folder)) if !name.contains(std::path::MAIN_SEPARATOR) => {
                (Some(name.to_owned()), folder)
            }
            _ => (None, text),
        };
        let is_name = |name: &String| !name.is_empty() && !name.contains('.');
        if path.is_empty() || !name.iter().all(is_name) {
            return Err("give a path, or a name without dots, = and a path".into());
        }
        Ok(Self { name, path: path.into() })
    }
}

impl AdapterPath {
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl AdapterArgs {
    /// Checks that the folders are there.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub(crate) fn validate(&self) -> Checked {
        for AdapterPath { path, .. } in &self.adapter {
            let is_gguf = path.is_file() && path.extension().is_some_and(|extension| extension == "gguf");
            require!(
                path.is_dir() || is_gguf,
                "--adapter {} is no folder and no .gguf file: give that of an adapter, with adapter_config.json in it.",
                path.display()
            );
        }
        Ok(())
    }

    /// Checks that a training has one adapter, with a model, and not another one beside it.
    ///
    /// # Errors
    /// Those of [`validate`](Self::validate).
    pub(crate) fn validate_trained(&self, has_model: bool, training: &TrainArgs) -> Checked {
        let Some(AdapterPath { path, name }) = self.adapter.first() else { return Ok(()) };
        let (shown, count) = (path.display(), self.adapter.len());
        require!(
            count == 1 && name.is_none(),
            "train takes one adapter without a name, and there are {count} of --adapter: give --adapter {shown} alone."
        );
        let others = [
            ("--lora", training.adapter().is_some()),
            ("--resume", training.resume.is_some()),
            ("--fresh", training.fresh),
        ];
        if let Some((flag, _)) = others.into_iter().find(|(_, is_given)| *is_given) {
            require!(
                false,
                "--adapter {shown} is the adapter that is trained on, and {flag} another beginning: leave one of them out."
            );
        }
        require!(has_model, "--adapter {shown} changes a model: give --model.");
        Ok(())
    }

    /// The adapter that a training goes on with.
    pub(crate) fn trained(&self) -> Option<&Path> {
        self.adapter.first().map(AdapterPath::path)
    }

    /// Checks that clients can ask for each adapter.
    ///
    /// # Errors
    /// Those of [`validate`](Self::validate).
    pub(crate) fn validate_names(&self) -> Checked {
        let unnamed = self.adapter.iter().find(|adapter| adapter.name().is_none());
        if let Some(AdapterPath { path, .. }) = unnamed {
            let path = path.display();
            require!(
                false,
                "--adapter {path} has no name by which clients may ask for it: give NAME={path}, or merge it into the model."
            );
        }
        Ok(())
    }

    /// Adds the adapters to the files of a model.
    ///
    /// # Errors
    /// If one is no adapter of this model.
    pub(crate) fn add_to(&self, files: Files) -> Result<Files> {
        let unnamed = |at: usize| if at == 0 { TRAINED.to_owned() } else { format!("{TRAINED}-{}", at + 1) };
        let named = self
            .adapter
            .iter()
            .enumerate()
            .map(|(at, AdapterPath { name, path })| (name.clone().unwrap_or_else(|| unnamed(at)), path));
        named.into_iter().try_fold(files, |files, (name, path)| files.with_adapter(&name, path))
    }
}

/// The adapter that `--lora` describes.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraFlag(AdapterConfig);

impl FromStr for LoraFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = LoraOptions::new(8);
        let (mut targets, mut alpha, mut saved, mut layers) =
            (TargetModules::AllLinear, None, Vec::new(), None);
        let (mut ranks, mut alphas) = (Vec::new(), Vec::new());
        let list = |value: &str| {
            let names: Vec<String> = value.split('+').map(str::to_owned).collect();
            let is_whole = names.iter().all(|name| !name.is_empty());
            if is_whole { Ok(names) } else { Err(format!("{value:?} has an empty name")) }
        };
        let mut given = BTreeSet::new();
        for field in text.split(',').filter(|field| !field.is_empty()) {
            let (key, value) = field.split_once('=').unwrap_or((field, ""));
            if !given.insert(key) {
                return Err(format!("{key} is given twice"));
            }
            let number = |value: &str| {
                let wrong = || format!("{key}={value} is no number");
                value.parse::<f64>().ok().filter(|number| number.is_finite()).ok_or_else(wrong)
            };
            let whole =
                |value: &str| value.parse::<usize>().map_err(|_| format!("{key}={value} is no number"));
            // A number for each name.
            let pairs = |value: &str| -> Result<Vec<(String, String)>, String> {
                let pair = |text: &str| match text.split_once(':') {
                    Some((name, number)) if !name.is_empty() => Ok((name.to_owned(), number.to_owned())),
                    _ => Err(format!("{key}={text} is no NAME:N")),
                };
                let pairs = value.split('+').map(pair).collect::<Result<Vec<_>, String>>()?;
                // The config of an adapter has them by name, so one of the two would be lost.
                let twice = pairs.iter().map(|(name, _)| name).duplicates().next().cloned();
                match twice {
                    Some(name) => Err(format!("{key} has {name} twice")),
                    None => Ok(pairs),
                }
            };
            match (key, value.is_empty()) {
                ("r", false) => options.rank = whole(value)?,
                ("alpha", false) => alpha = Some(number(value)?),
                ("dropout", false) => options.dropout = number(value)?,
                ("targets", false) if value == "all-linear" => targets = TargetModules::AllLinear,
                ("targets", false) => targets = TargetModules::Suffixes(list(value)?),
                ("save", false) => saved = list(value)?,
                ("layers", false) => {
                    layers = Some(value.split('+').map(whole).collect::<Result<Vec<_>, String>>()?);
                }
                ("ranks", false) => {
                    let pair = |(name, rank): (String, String)| match whole(&rank)? {
                        0 => Err(format!("{key}={name}:0 is no rank of at least 1")),
                        rank => Ok((name, rank)),
                    };
                    ranks = pairs(value)?.into_iter().map(pair).collect::<Result<Vec<_>, String>>()?;
                }
                ("alphas", false) => {
                    let pair = |(name, alpha): (String, String)| Ok((name, number(&alpha)?));
                    alphas = pairs(value)?.into_iter().map(pair).collect::<Result<Vec<_>, String>>()?;
                }
                ("rslora", true) => options.rank_stabilized = true,
                ("dora", true) => options.dora = true,
                ("bias", true) => options.bias = true,
                _ => {
                    return Err(format!(
                        "{field:?} is not known; known: r=N, alpha=X, dropout=P, targets=NAME+NAME or all-linear, \
                         layers=N+N, ranks=NAME:N+NAME:N, alphas=NAME:X+NAME:X, save=NAME+NAME, rslora, dora, bias"
                    ));
                }
            }
        }
        options.alpha = alpha.unwrap_or(options.rank as f64);
        if alpha.is_none() {
            // The scale is 1 beside other ranks too.
            let own = ranks.iter().filter(|(name, _)| alphas.iter().all(|(other, _)| other != name));
            let own: Vec<(String, f64)> = own.map(|(name, rank)| (name.clone(), *rank as f64)).collect();
            alphas.extend(own);
        }
        if options.rank == 0 || !(0.0..1.0).contains(&options.dropout) {
            return Err("expected r of at least 1, and a dropout in [0, 1)".into());
        }
        let config = AdapterConfig {
            modules_to_save: saved,
            layers,
            rank_pattern: ranks,
            alpha_pattern: alphas,
            ..AdapterConfig::new(options, targets)
        };
        Ok(Self(config))
    }
}

impl LoraFlag {
    /// Returns the config of a fresh adapter of the model at a path.
    pub(crate) fn config(&self, base: &Path) -> AdapterConfig {
        with_base(self.0.clone(), base)
    }
}

/// Returns the config of an adapter of the model at a path.
pub(crate) fn with_base(config: AdapterConfig, base: &Path) -> AdapterConfig {
    // A checkpoint is read from other folders too.
    let base = std::fs::canonicalize(base).unwrap_or_else(|_| base.to_owned());
    AdapterConfig { base: Some(base.display().to_string()), ..config }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_adapters_are_read_or_refused_by_name() {
        let LoraFlag(config) =
            "r=16,alpha=8,dropout=0.1,targets=q_proj+v_proj,layers=0+2,rslora".parse().unwrap();
        assert_eq!((config.options.rank, config.options.alpha, config.options.dropout), (16, 8.0, 0.1));
        assert!(config.options.rank_stabilized && !config.options.dora);
        assert_eq!(config.targets, TargetModules::Suffixes(vec!["q_proj".into(), "v_proj".into()]));
        assert_eq!(config.layers, Some(vec![0, 2]));
        let LoraFlag(config) = "r=4".parse().unwrap();
        assert_eq!((config.options.scale(), config.targets), (1.0, TargetModules::AllLinear));
        let LoraFlag(config) = "r=4,ranks=q_proj:8+v_proj:2,alphas=v_proj:1".parse().unwrap();
        assert_eq!(config.rank_pattern, [("q_proj".into(), 8), ("v_proj".into(), 2)]);
        assert_eq!(config.alpha_pattern, [("v_proj".into(), 1.0), ("q_proj".into(), 8.0)]);
        let LoraFlag(config) = "r=4,alpha=8,ranks=q_proj:8".parse().unwrap();
        assert_eq!((config.options.alpha, config.alpha_pattern), (8.0, vec![]));
        for (text, want) in [
            ("rank=4", "\"rank=4\" is not known"),
            ("r=0", "at least 1"),
            ("r=x", "r=x is no number"),
            ("alpha=nan", "alpha=nan is no number"),
            ("dropout=1", "dropout in [0, 1)"),
            ("dora=1", "not known"),
            ("layers=1+b", "layers=b is no number"),
            ("save=norm+", "empty name"),
            ("ranks=q_proj", "no NAME:N"),
            ("ranks=q_proj:0", "at least 1"),
            ("ranks=q_proj:8+v_proj:8+q_proj:4", "ranks has q_proj twice"),
            ("alphas=q_proj:8+q_proj:8", "alphas has q_proj twice"),
            ("alphas=q_proj:x", "no number"),
            ("r=4,r=8", "r is given twice"),
        ] {
            let said = text.parse::<LoraFlag>().unwrap_err();
            assert!(said.contains(want), "{text}: {said}");
        }
    }

    #[test]
    fn adapters_have_names_and_paths() {
        let named = |text: &str| text.parse::<AdapterPath>().map(|path| (path.name, path.path));
        assert_eq!(named("./a=b"), Ok((None, "./a=b".into())));
        assert_eq!(named("notes=./b"), Ok((Some("notes".into()), "./b".into())));
        assert_eq!(named("b"), Ok((None, "b".into())));
        assert!(named("a.b=c").is_err() && named("x=").is_err() && named("=x").is_err());
    }
}
