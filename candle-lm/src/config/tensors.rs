//! The tensors of a model: their names and shapes, as layers build them and as files have them.

use candle_shard::nn::Heads;

use super::Config;
use super::experts::Experts;
use super::parts::{LatentWidths, Parts, QkNorm};

/// The name and shape of a tensor.
type Tensor = (String, Vec<usize>);

/// What layers call the router and the stacked weights of experts, within a layer.
pub(crate) const ROUTER: &str = "mlp.router";
/// The bias of the choice of experts, within a layer. Ranks hold it as f32.
pub(crate) const CHOICE_BIAS: &str = "mlp.router.bias";
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
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden]));
        }
        (0..self.num_hidden_layers).for_each(|layer| tensors.extend(self.of_layer(layer)));
        tensors
    }

    /// The name and shape of every tensor that a training changes: all but the biases of choices, which have no gradients.
    pub(crate) fn learned(&self) -> Vec<Tensor> {
        self.tensors().into_iter().filter(|(name, _)| !name.ends_with(CHOICE_BIAS)).collect()
    }

    fn of_layer(&self, layer: usize) -> Vec<Tensor> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let Heads { query, key_value, dim } = self.heads();
        let Parts { qkv_bias, output_bias, mlp_bias, qk_norm, norms, .. } = self.parts;
        let named = |name: &str, parameter: &str| format!("model.layers.{layer}.{name}.{parameter}");
        let attention = match &self.parts.latent {
            Some(widths) => self.of_latents(widths),
            None => vec![
                ("self_attn.q_proj", query * dim, hidden, qkv_bias),
                ("self_attn.k_proj", key_value * dim, hidden, qkv_bias),
                ("self_attn.v_proj", key_value * dim, hidden, qkv_bias),
                ("self_attn.o_proj", hidden, query * dim, output_bias),
            ],
        };
        let dense = [
            ("mlp.gate_proj", inner, hidden, mlp_bias),
            ("mlp.up_proj", inner, hidden, mlp_bias),
            ("mlp.down_proj", hidden, inner, mlp_bias),
        ];
        let experts = self.parts.experts(layer);
        let dense = dense.into_iter().filter(|_| experts.is_none());
        let mut tensors = Vec::new();
        for (name, rows, columns, has_bias) in attention.into_iter().chain(dense) {
            tensors.push((named(name, "weight"), vec![rows, columns]));
            tensors.extend(has_bias.then(|| (named(name, "bias"), vec![rows])));
        }
        if let Some(Experts { count, hidden: inner, has_bias, shared, shared_gate, names, .. }) = experts {
            tensors.push((named(ROUTER, "weight"), vec![*count, hidden]));
            tensors.extend(has_bias.then(|| (named(ROUTER, "bias"), vec![*count])));
            let [module, gate] = names.shared;
            if *shared > 0 {
                let shapes = [
                    ("gate_proj", [*shared, hidden]),
                    ("up_proj", [*shared, hidden]),
                    ("down_proj", [hidden, *shared]),
                ];
                let of = |(part, shape): (&str, [usize; 2])| {
                    (named(&format!("{module}.{part}"), "weight"), shape.into())
                };
                tensors.extend(shapes.map(of));
                tensors.extend(shared_gate.then(|| (named(gate, "weight"), vec![1, hidden])));
            }
            let shapes = [[*inner, hidden], [*inner, hidden], [hidden, *inner]];
            let name = |name: &str| format!("model.layers.{layer}.{name}");
            tensors.extend(
                EXPERTS
                    .iter()
                    .zip(shapes)
                    .map(|(part, [rows, columns])| (name(part), vec![*count, rows, columns])),
            );
        }
        tensors.extend(norms.names().into_iter().flatten().map(|name| (named(name, "weight"), vec![hidden])));
        let heads = match qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some([dim, dim]),
            QkNorm::All => Some([query * dim, key_value * dim]),
        };
        if let Some(LatentWidths { query, rank, .. }) = self.parts.latent {
            tensors.extend(query.map(|width| (named("self_attn.q_a_layernorm", "weight"), vec![width])));
            tensors.push((named("self_attn.kv_a_layernorm", "weight"), vec![rank]));
        }
        if let Some([query, key]) = heads {
            tensors.push((named("self_attn.q_norm", "weight"), vec![query]));
            tensors.push((named("self_attn.k_norm", "weight"), vec![key]));
        }
        tensors
    }

    /// The matrices of latent attention: their names, rows and columns, and whether they have biases.
    fn of_latents(&self, widths: &LatentWidths) -> Vec<(&'static str, usize, usize, bool)> {
        let &LatentWidths { query, rank, own, rotary, value } = widths;
        let (hidden, heads, bias) = (self.hidden_size, self.num_attention_heads, self.parts.qkv_bias);
        let rows = heads * (own + rotary);
        let mut matrices = match query {
            None => vec![("self_attn.q_proj", rows, hidden, false)],
            Some(width) => {
                vec![("self_attn.q_a_proj", width, hidden, bias), ("self_attn.q_b_proj", rows, width, false)]
            }
        };
        matrices.extend([
            ("self_attn.kv_a_proj_with_mqa", rank + rotary, hidden, bias),
            ("self_attn.kv_b_proj", heads * (own + value), rank, false),
            ("self_attn.o_proj", hidden, heads * value, self.parts.output_bias),
        ]);
        matrices
    }

    /// The tensors that files of some families have in one: the name of each, and the names and rows of its parts.
    pub fn fused(&self) -> Vec<(String, Vec<(String, usize)>)> {
        let layers = if self.parts.fused { self.num_hidden_layers } else { 0 };
        let Heads { query, key_value, dim } = self.heads();
        let of_layer = |layer: usize| {
            let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
            let attention = [("q", query), ("k", key_value), ("v", key_value)];
            let attention =
                attention.map(|(part, heads)| (name(&format!("self_attn.{part}_proj")), heads * dim));
            let gate = ["gate", "up"].map(|part| (name(&format!("mlp.{part}_proj")), self.intermediate_size));
            [(name("self_attn.qkv_proj"), attention.to_vec()), (name("mlp.gate_up_proj"), gate.to_vec())]
        };
        (0..layers).flat_map(of_layer).collect()
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
        let Some(experts) = &self.parts.experts else { return name.to_owned() };
        let layer = |parameter: &str| name.strip_suffix(&format!(".{ROUTER}.{parameter}"));
        match (layer("weight"), layer("bias")) {
            (Some(layer), _) => format!("{layer}.{}.weight", experts.names.router),
            (_, Some(layer)) => format!("{layer}.{}", experts.names.bias),
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

    /// Whether files have a tensor of a layer that follows those of the model and predicts further tokens, which is left out.
    pub(crate) fn is_of_draft(&self, name: &str) -> bool {
        let layer = name.strip_prefix("model.layers.").or_else(|| name.strip_prefix("blk."));
        let layer = layer.and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        let drafts = self.num_hidden_layers..self.num_hidden_layers + self.parts.draft_layers;
        layer.is_some_and(|layer| drafts.contains(&layer))
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
