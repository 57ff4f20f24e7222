//! The modules of a model, by the paths that transformers has for them.

use super::config::ModuleKind;
use crate::config::Config;
use crate::config::tensors::ROUTER;

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
    /// The path of `A`, which all parts have in common.
    pub(super) fn first(&self) -> &str {
        if let [(part, _)] = &self.parts[..] { part } else { &self.path }
    }

    /// The shape of the weight of so many of its rows.
    pub(super) fn weight_shape(&self, rows: usize) -> Vec<usize> {
        if self.kind == ModuleKind::Norm { vec![rows] } else { vec![rows, self.shape[1]] }
    }
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
        let stored = config.stored_name(name);
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
        let stored: Vec<String> = parts.iter().map(|(part, _)| module(&config.stored_name(part))).collect();
        let parts: Vec<(String, usize)> = parts.iter().map(|(part, rows)| (module(part), *rows)).collect();
        let is_part = |module: &LayerModule| stored.contains(&module.path);
        // The taps of convolutions are no module here.
        let Some(columns) = modules.iter().find(|one| is_part(one)).map(|one| one.shape[1]) else { continue };
        modules.retain(|one| !is_part(one));
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        let (path, kind) = (module(&config.stored_name(&name)), ModuleKind::Linear);
        let bias =
            |(part, _): &(String, usize)| tensors.iter().any(|(name, _)| *name == format!("{part}.bias"));
        let has_bias = parts.iter().any(bias);
        modules.push(LayerModule { path, kind, shape: [rows, columns], parts, has_bias });
    }
    modules
}

fn kind_of(path: &str) -> ModuleKind {
    match path {
        "lm_head" => ModuleKind::Output,
        "model.embed_tokens" => ModuleKind::Table,
        _ => ModuleKind::Linear,
    }
}
