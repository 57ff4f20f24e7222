//! The tensors of a model: their names and shapes, as layers build them and as files have them.

use candle_shard::nn::Heads;

use super::Config;
use super::experts::Experts;
use super::parts::{FUSED_GATE, FUSED_QKV, NormKind, Parts};

/// The name and shape of a tensor.
type Tensor = (String, Vec<usize>);

/// What layers call the router and the stacked weights of experts, within a layer.
pub(crate) const ROUTER: &str = "mlp.router";
/// Gate, up and down.
pub(crate) const EXPERTS: [&str; 3] =
    ["mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"];

impl Config {
    /// The name and shape of every tensor of the model, as layers build them.
    pub fn tensors(&self) -> Vec<Tensor> {
        let hidden = self.hidden_size;
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        if self.parts.norm == NormKind::LayerWithBias {
            tensors.push(("model.norm.bias".to_owned(), vec![hidden]));
        }
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden]));
        }
        (0..self.num_hidden_layers).for_each(|layer| tensors.extend(self.of_layer(layer)));
        tensors
    }

    fn of_layer(&self, layer: usize) -> Vec<Tensor> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let Heads { query, key_value, dim } = self.heads();
        let Parts { qkv_bias, output_bias, mlp_bias, qk_norm, norms, .. } = self.parts;
        let named = |name: &str, parameter: &str| format!("model.layers.{layer}.{name}.{parameter}");
        let attention = [
            ("self_attn.q_proj", query * dim, hidden, qkv_bias),
            ("self_attn.k_proj", key_value * dim, hidden, qkv_bias),
            ("self_attn.v_proj", key_value * dim, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, query * dim, output_bias),
        ];
        let dense = [
            ("mlp.gate_proj", inner, hidden, mlp_bias),
            ("mlp.up_proj", inner, hidden, mlp_bias),
            ("mlp.down_proj", hidden, inner, mlp_bias),
        ];
        let experts = self.parts.experts(layer);
        let dense = dense.into_iter().skip(usize::from(!self.parts.gated)).filter(|_| experts.is_none());
        let mut tensors = Vec::new();
        for (name, rows, columns, has_bias) in attention.into_iter().chain(dense) {
            tensors.push((named(name, "weight"), vec![rows, columns]));
            tensors.extend(has_bias.then(|| (named(name, "bias"), vec![rows])));
        }
        if let Some(Experts { count, hidden: inner, .. }) = experts {
            tensors.push((named(ROUTER, "weight"), vec![*count, hidden]));
            let shapes = [[*inner, hidden], [*inner, hidden], [hidden, *inner]];
            let name = |name: &str| format!("model.layers.{layer}.{name}");
            tensors.extend(
                EXPERTS
                    .iter()
                    .zip(shapes)
                    .map(|(part, [rows, columns])| (name(part), vec![*count, rows, columns])),
            );
        }
        for name in norms.names().into_iter().flatten() {
            tensors.push((named(name, "weight"), vec![hidden]));
            let has_bias = self.parts.norm == NormKind::LayerWithBias;
            tensors.extend(has_bias.then(|| (named(name, "bias"), vec![hidden])));
        }
        for (name, width) in
            qk_norm.names().into_iter().zip(qk_norm.widths(self.heads()).into_iter().flatten())
        {
            tensors.push((named(&format!("self_attn.{name}"), "weight"), vec![width]));
        }
        tensors
    }

    /// The tensors that files of some families have in one: the name of each, and the names and rows of its parts.
    pub fn fused(&self) -> Vec<(String, Vec<(String, usize)>)> {
        let Heads { query, key_value, dim } = self.heads();
        let of_layer = |layer: usize| {
            let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
            let attention = [("q", query), ("k", key_value), ("v", key_value)];
            let attention =
                attention.map(|(part, heads)| (name(&format!("self_attn.{part}_proj")), heads * dim));
            let gate = ["gate", "up"].map(|part| (name(&format!("mlp.{part}_proj")), self.intermediate_size));
            let all = [(FUSED_QKV, attention.to_vec()), (FUSED_GATE, gate.to_vec())];
            let fused = all.into_iter().filter(|(module, _)| self.parts.fused.contains(module));
            fused.map(|(module, parts)| (name(module), parts)).collect::<Vec<_>>()
        };
        (0..self.num_hidden_layers).flat_map(of_layer).collect()
    }

    /// The parts of a stacked tensor of experts as files have them, each expert by itself; `None` for other tensors.
    pub fn unstacked(&self, name: &str) -> Option<Vec<String>> {
        let (layer, module) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let Experts { count, names, .. } = self.parts.experts(layer.parse().ok()?)?;
        let part = EXPERTS.iter().position(|part| *part == module)?;
        let of = |expert: usize| {
            format!("model.layers.{layer}.{}.{expert}.{}.weight", names.experts, names.layers[part])
        };
        Some((0..*count).map(of).collect())
    }

    /// The name that a tensor has in files, if it is there by itself.
    pub fn stored_name(&self, name: &str) -> String {
        let router = format!(".{ROUTER}.weight");
        match (name.strip_suffix(&router), &self.parts.experts) {
            (Some(layer), Some(experts)) => format!("{layer}.{}.weight", experts.names.router),
            _ => name.to_owned(),
        }
    }

    /// The name and shape of every tensor, as the files of transformers have them.
    pub fn stored(&self) -> Vec<Tensor> {
        let mut tensors: Vec<Tensor> = Vec::new();
        for (name, shape) in self.tensors() {
            match self.unstacked(&name) {
                Some(parts) => tensors.extend(parts.into_iter().map(|part| (part, shape[1..].to_vec()))),
                None => tensors.push((self.stored_name(&name), shape)),
            }
        }
        for (name, parts) in self.fused() {
            let is_part = |tensor: &Tensor| parts.iter().any(|(part, _)| *part == tensor.0);
            let columns = tensors.iter().find(|tensor| is_part(tensor)).map_or(0, |(_, shape)| shape[1]);
            tensors.retain(|tensor| !is_part(tensor));
            tensors.push((name, vec![parts.iter().map(|(_, rows)| rows).sum(), columns]));
        }
        tensors
    }

    /// Whether some layers have one feed-forward network for all tokens.
    pub fn has_dense_layers(&self) -> bool {
        (0..self.num_hidden_layers).any(|layer| self.parts.experts(layer).is_none())
    }

    /// The parameters of the model.
    pub fn parameters(&self) -> usize {
        self.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// The parameters of a tensor that compute for each token: of experts those that a token chooses.
    pub fn active(&self, name: &str, shape: &[usize]) -> usize {
        let all: usize = shape.iter().product();
        match &self.parts.experts {
            Some(Experts { count, chosen, .. }) if name.contains(".experts.") => all / count * chosen,
            _ => all,
        }
    }
}
