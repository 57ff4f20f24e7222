//! The tensors of a model as files have them: their names and shapes, and which of those in memory each has.

use candle_core::Tensor;
use candle_shard::nn::Heads;

use super::Config;
use super::experts::{Experts, StackLayout, StackNames};
use super::mixers::MixerKind;
use super::parts::{FUSED_GATE, FUSED_QKV, FUSED_SHARED};
use super::tensors::{CHOICE_BIAS, EXPERT_BIASES, EXPERTS, NamedShape, ROUTER};

/// A tensor of files that has those of all experts of a layer.
#[derive(Clone, Debug)]
pub struct ExpertStack {
    /// Its name in files.
    pub name: String,
    /// Its shape in files.
    pub shape: Vec<usize>,
    /// The tensors in memory that it has.
    pub parts: Vec<String>,
    /// How its matrices lie.
    pub layout: StackLayout,
}

impl ExpertStack {
    /// The tensor of files, of tensors in memory.
    pub(crate) fn join(&self, parts: &[Tensor]) -> candle_core::Result<Tensor> {
        let both = match self.layout {
            StackLayout::Interleaved => Tensor::stack(parts, 2)?.flatten(1, 2)?,
            StackLayout::Rows | StackLayout::Columns => Tensor::cat(parts, 1)?,
        };
        if self.is_transposed() { both.transpose(1, 2)?.contiguous() } else { Ok(both) }
    }

    /// Whether it has transposed matrices.
    pub fn is_transposed(&self) -> bool {
        self.layout != StackLayout::Rows && self.shape.len() == 3
    }
}

impl Config {
    /// The tensors that files of some families have in one: the name of each, and the names and rows of its parts.
    pub fn fused(&self) -> Vec<(String, Vec<(String, usize)>)> {
        let Heads { query, key_value, dim } = self.heads();
        let of_layer = |layer: usize| {
            let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
            let attention = [("q", query), ("k", key_value), ("v", key_value)];
            let attention =
                attention.map(|(part, heads)| (name(&format!("self_attn.{part}_proj")), heads * dim));
            let gate = ["gate", "up"].map(|part| (name(&format!("mlp.{part}_proj")), self.intermediate_size));
            let shared = self.parts.experts.as_ref().map_or(0, |experts| experts.shared);
            let shared =
                ["gate", "up"].map(|part| (name(&format!("mlp.shared_experts.{part}_proj")), shared));
            let all = [
                (FUSED_QKV, attention.to_vec()),
                (FUSED_GATE, gate.to_vec()),
                (FUSED_SHARED, shared.to_vec()),
            ];
            let fused = all.into_iter().filter(|(module, _)| self.parts.fused.contains(module));
            fused.map(|(module, parts)| (name(module), parts)).collect::<Vec<_>>()
        };
        let of_mixer = |(layer, mixer): (usize, &MixerKind)| {
            let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
            match mixer {
                MixerKind::Attention | MixerKind::Latent(_) | MixerKind::None => Vec::new(),
                MixerKind::Mamba(heads) | MixerKind::Both(heads) => {
                    let at = |name: String| format!("model.layers.{layer}.{name}");
                    let all = |(name, parts): (String, Vec<(String, usize)>)| {
                        (at(name), parts.into_iter().map(|(part, rows)| (at(part), rows)).collect())
                    };
                    heads.fused().into_iter().map(all).collect()
                }
                MixerKind::ShortConv { .. } => {
                    let parts =
                        ["b", "c", "x"].map(|part| (name(&format!("conv.{part}_proj")), self.hidden_size));
                    vec![(name("conv.in_proj"), parts.to_vec())]
                }
                MixerKind::DeltaNet(heads) => {
                    let [keys, values] = heads.channels();
                    let parts = |module: &str| {
                        let part = |(part, rows): (&str, usize)| {
                            (name(&format!("linear_attn.{module}_{part}")), rows)
                        };
                        [("q", keys), ("k", keys), ("v", values)].map(part).to_vec()
                    };
                    let convs = (name("linear_attn.conv1d"), parts("conv1d"));
                    let inputs = (name("linear_attn.in_proj_qkv"), parts("in_proj"));
                    if heads.by_key_head { vec![convs] } else { vec![inputs, convs] }
                }
            }
        };
        let mixers = self.parts.mixers.iter().enumerate().flat_map(of_mixer);
        (0..self.num_hidden_layers).flat_map(of_layer).chain(mixers).collect()
    }

    /// The parts of a stacked tensor of experts as files have them, each expert by itself; `None` for other tensors.
    pub fn unstacked(&self, name: &str) -> Option<Vec<String>> {
        let has_stacks = self.parts.experts.as_ref().is_some_and(|experts| experts.names.stacks.is_some());
        if has_stacks { None } else { self.of_each_expert(name) }
    }

    /// The names of the same parts, whether files of the family have experts so or not: quantized ones may where others do not.
    pub(crate) fn of_each_expert(&self, name: &str) -> Option<Vec<String>> {
        let model = self.parts.model_name;
        let own = name.strip_prefix("model.").or_else(|| name.strip_prefix(model)?.strip_prefix('.'))?;
        let (layer, module) = own.strip_prefix("layers.")?.split_once('.')?;
        let Experts { count, names, .. } = self.parts.experts(layer.parse().ok()?)?;
        let part = EXPERTS.iter().position(|part| *part == module)?;
        let of = |expert: usize| {
            format!("{model}.layers.{layer}.{}.{expert}.{}.weight", names.experts, names.layers[part])
        };
        Some((0..*count).map(of).collect())
    }

    /// The tensors of files that have those of all experts of a layer.
    pub fn stacks(&self) -> Vec<ExpertStack> {
        let of_layer = |layer: usize| {
            let Some(experts) = self.parts.experts(layer) else { return Vec::new() };
            let Some(StackNames { gate_up, down, layout }) = experts.names.stacks else {
                return Vec::new();
            };
            let Experts { count, hidden: inner, biases, .. } = *experts;
            let at = |name: &str| format!("model.layers.{layer}.{name}");
            let stack = |name: &str, parts: &[&str], rows: usize, columns: Option<usize>| {
                let mut shape: Vec<usize> = [rows].into_iter().chain(columns).collect();
                if layout != StackLayout::Rows {
                    shape.reverse();
                }
                shape.insert(0, count);
                let parts = parts.iter().map(|part| at(part)).collect();
                ExpertStack { name: at(name), shape, parts, layout }
            };
            let hidden = self.hidden_size;
            let mut stacks = vec![
                stack(gate_up, &EXPERTS[..2], 2 * inner, Some(hidden)),
                stack(down, &EXPERTS[2..], hidden, Some(inner)),
            ];
            if biases {
                stacks.push(stack(&format!("{gate_up}_bias"), &EXPERT_BIASES[..2], 2 * inner, None));
                stacks.push(stack(&format!("{down}_bias"), &EXPERT_BIASES[2..], hidden, None));
            }
            stacks
        };
        (0..self.num_hidden_layers).flat_map(of_layer).collect()
    }

    /// The name that a tensor has in files, if it is there by itself.
    pub fn stored_name(&self, name: &str) -> String {
        let stored = self.stored_module(name);
        match stored.strip_prefix("model.") {
            Some(rest) => format!("{}.{rest}", self.parts.model_name),
            None => stored,
        }
    }

    /// The name that a tensor has in files, in a model that has the name of others.
    fn stored_module(&self, name: &str) -> String {
        let own = || self.renamed(name, |(own, stored)| (own, stored));
        let Some(experts) = &self.parts.experts else { return own() };
        let layer = |parameter: &str| name.strip_suffix(&format!(".{ROUTER}.{parameter}"));
        match (layer("weight"), layer("bias"), layer("logit_bias")) {
            (Some(layer), ..) => format!("{layer}.{}.weight", experts.names.router),
            (_, Some(layer), _) => format!("{layer}.{}", experts.names.bias),
            (.., Some(layer)) => format!("{layer}.{}.bias", experts.names.router),
            _ => own(),
        }
    }

    /// The shape that a tensor has in files, if it is there by itself.
    fn stored_shape(&self, name: &str, mut shape: Vec<usize>) -> Vec<usize> {
        if self.is_row(name) {
            shape.insert(0, 1);
        }
        shape
    }

    /// Whether files have a vector as a matrix of one row.
    pub(crate) fn is_row(&self, name: &str) -> bool {
        let has_row = self.parts.experts.as_ref().is_some_and(|experts| experts.names.has_bias_row);
        has_row && name.ends_with(CHOICE_BIAS)
    }

    /// The name that layers have for a tensor of a file, if it is there by itself.
    pub fn name_in_memory(&self, name: &str) -> String {
        let rest = name.strip_prefix(self.parts.model_name).and_then(|rest| rest.strip_prefix('.'));
        let name = rest.map_or(name.to_owned(), |rest| format!("model.{rest}"));
        let module = name.rsplit_once('.').map_or("", |(module, _)| module);
        // Tensors of GGUF files have such a name already.
        let is_own =
            |(own, stored): &(&str, &str)| own.ends_with(stored) && module.ends_with(&format!(".{own}"));
        if self.parts.names.iter().any(is_own) {
            return name;
        }
        self.renamed(&name, |(own, stored)| (stored, own))
    }

    /// The name of a tensor whose module gets the second name of a pair in the place of the first one.
    fn renamed(
        &self,
        name: &str,
        pair: fn((&'static str, &'static str)) -> (&'static str, &'static str),
    ) -> String {
        let found = name.rsplit_once('.').and_then(|(module, parameter)| {
            let mut names = self.parts.names.iter().map(|&names| pair(names));
            names.find_map(|(from, to)| {
                let before = module.strip_suffix(from)?;
                (before.is_empty() || before.ends_with('.')).then(|| format!("{before}{to}.{parameter}"))
            })
        });
        found.unwrap_or_else(|| name.to_owned())
    }

    /// The name and shape of every tensor, as the files of transformers have them.
    pub fn stored(&self) -> Vec<NamedShape> {
        let mut tensors: Vec<NamedShape> = Vec::new();
        for (name, shape) in self.tensors() {
            match self.unstacked(&name) {
                Some(parts) => tensors.extend(parts.into_iter().map(|part| (part, shape[1..].to_vec()))),
                None => tensors.push((self.stored_name(&name), self.stored_shape(&name, shape))),
            }
        }
        for (name, parts) in self.fused() {
            let is_part =
                |tensor: &NamedShape| parts.iter().any(|(part, _)| self.stored_name(part) == tensor.0);
            let found = tensors.iter().find(|tensor| is_part(tensor));
            let mut shape = found.map_or_else(Vec::new, |(_, shape)| shape.clone());
            if let Some(rows) = shape.first_mut() {
                *rows = parts.iter().map(|(_, rows)| rows).sum();
            }
            tensors.retain(|tensor| !is_part(tensor));
            tensors.push((self.stored_name(&name), shape));
        }
        for ExpertStack { name, shape, parts, .. } in self.stacks() {
            tensors.retain(|(tensor, _)| !parts.contains(tensor));
            tensors.push((name, shape));
        }
        tensors
    }
}
