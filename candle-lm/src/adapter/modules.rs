//! The modules of a model, by the paths that transformers has for them.

use super::config::ModuleKind;
use crate::config::Config;
use crate::config::tensors::{LAYER_EMBEDDINGS, ROUTER};

/// The table of the input.
const TABLE: &str = "model.embed_tokens";

/// A module with a weight.
#[derive(Clone, Debug)]
pub struct LayerModule {
    /// Its path, as in transformers.
    pub path: String,
    /// What it is.
    pub kind: ModuleKind,
    /// The rows and columns of its weight; a norm has one column.
    pub shape: [usize; 2],
    /// The paths of the layers that it is here, and their rows: several where files have several weights in one.
    pub parts: Vec<(String, usize)>,
    /// Whether it has a bias.
    pub has_bias: bool,
}

impl LayerModule {
    /// Whether its weight is the one that a tied model has for its input and its output.
    pub(super) fn is_end(&self) -> bool {
        self.kind == ModuleKind::Output || self.parts.iter().any(|(path, _)| path == TABLE)
    }

    /// The path of `A`, which all parts have in common.
    pub(super) fn first(&self) -> &str {
        first_of(self.parts.iter().map(|(part, _)| part.as_str()), &self.path)
    }

    /// The shape of the weight of so many of its rows.
    pub(super) fn weight_shape(&self, rows: usize) -> Vec<usize> {
        if self.kind == ModuleKind::Norm { vec![rows] } else { vec![rows, self.shape[1]] }
    }
}

/// The path of the `A` of what is at `path` in transformers and has these parts here: that of the only part, or the path that all have in
/// common.
pub(super) fn first_of<'a>(mut parts: impl Iterator<Item = &'a str>, path: &'a str) -> &'a str {
    parts.next().filter(|_| parts.next().is_none()).unwrap_or(path)
}

/// The modules of a model but those of experts, of which an adapter can change linear layers, the table and the output layer.
pub fn modules(config: &Config) -> Vec<LayerModule> {
    let tensors = config.tensors();
    let router = format!(".{ROUTER}.weight");
    let mut modules: Vec<LayerModule> = Vec::new();
    for (name, shape) in &tensors {
        let Some(path) = name.strip_suffix(".weight").filter(|_| !name.ends_with(&router)) else { continue };
        let (kind, shape) = match shape[..] {
            [rows, columns] => (kind_of(path), [rows, columns]),
            [rows] => (ModuleKind::Norm, [rows, 1]),
            _ => continue,
        };
        let bias = format!("{path}.bias");
        let has_bias = tensors.iter().any(|(name, _)| *name == bias);
        let parts = vec![(path.to_owned(), shape[0])];
        let stored = in_memory(config, config.stored_name(name));
        let path = stored.strip_suffix(".weight").unwrap_or(path).to_owned();
        modules.push(LayerModule { path, kind, shape, parts, has_bias });
    }
    if config.tie_word_embeddings {
        let (path, shape) = ("lm_head".to_owned(), [config.vocab_size, config.hidden_size]);
        let parts = vec![(path.clone(), shape[0])];
        modules.push(LayerModule { path, kind: ModuleKind::Output, shape, parts, has_bias: false });
    }
    for (name, parts) in config.fused() {
        let module = |tensor: &str| tensor.trim_end_matches(".weight").to_owned();
        let stored_module = |name: &str| module(&in_memory(config, config.stored_name(name)));
        let stored: Vec<String> = parts.iter().map(|(part, _)| stored_module(part)).collect();
        let parts: Vec<(String, usize)> = parts.iter().map(|(part, rows)| (module(part), *rows)).collect();
        let is_part = |module: &LayerModule| stored.contains(&module.path);
        // The taps of convolutions are no module here.
        let Some(columns) = modules.iter().find(|one| is_part(one)).map(|one| one.shape[1]) else { continue };
        modules.retain(|one| !is_part(one));
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        let (path, kind) = (stored_module(&name), ModuleKind::Linear);
        let bias =
            |(part, _): &(String, usize)| tensors.iter().any(|(name, _)| *name == format!("{part}.bias"));
        let has_bias = parts.iter().any(bias);
        modules.push(LayerModule { path, kind, shape: [rows, columns], parts, has_bias });
    }
    modules
}

/// The convolutions of a model, all of which have a filter for each channel: their paths, as in transformers, and their channels.
pub(super) fn convolutions(config: &Config) -> Vec<(String, usize)> {
    let tensors = config.tensors();
    let taps = tensors.iter().filter(|(name, shape)| shape.len() == 3 && name.ends_with(".weight"));
    let mut all: Vec<(String, usize)> =
        taps.map(|(name, shape)| (config.stored_name(name), shape[0])).collect();
    for (name, parts) in config.fused() {
        let stored: Vec<String> = parts.iter().map(|(part, _)| config.stored_name(part)).collect();
        let before = all.len();
        all.retain(|(tap, _)| !stored.contains(tap));
        if all.len() < before {
            all.push((config.stored_name(&name), parts.iter().map(|(_, rows)| rows).sum()));
        }
    }
    let path = |name: String| in_memory(config, name).trim_end_matches(".weight").to_owned();
    all.into_iter().map(|(name, channels)| (path(name), channels)).collect()
}

/// The name that transformers has in memory for what files have by this one.
pub(super) fn in_memory(config: &Config, stored: String) -> String {
    match stored.strip_prefix("backbone.").filter(|_| config.family == "nemotron_h") {
        Some(rest) => format!("model.{rest}"),
        None => stored,
    }
}

fn kind_of(path: &str) -> ModuleKind {
    match path {
        "lm_head" => ModuleKind::Output,
        TABLE => ModuleKind::Table,
        path if path == LAYER_EMBEDDINGS[0] => ModuleKind::Table,
        _ => ModuleKind::Linear,
    }
}
