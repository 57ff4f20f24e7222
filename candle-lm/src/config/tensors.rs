//! The tensors of a model: their names and shapes, as layers build them. `stored.rs` has those of files.

use candle_shard::nn::Heads;

use super::Config;
use super::experts::Experts;
use super::mamba::MambaHeads;
use super::mixers::{DeltaHeads, MixerKind};
use super::parts::{LatentWidths, LayerEmbeddingSizes, NormKind, Parts};

/// The name and shape of a tensor.
pub(super) type NamedShape = (String, Vec<usize>);

/// What layers call the router and the stacked weights of experts, within a layer.
pub(crate) const ROUTER: &str = "mlp.router";
/// The norms of a layer whose experts are beside another network: behind that one, before the experts, and behind these.
pub(crate) const BESIDE_DENSE: [&str; 3] =
    ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"];
/// The bias of the choice of experts, within a layer. Ranks hold it as f32.
pub(crate) const CHOICE_BIAS: &str = "mlp.router.bias";
/// The factor of the states behind a layer, within it. It is not learned.
pub(crate) const LAYER_SCALAR: &str = "layer_scalar";
/// The table with the embeddings of each layer, the projection of the first states that is joined with them, and the norm of each
/// layer's part of it.
pub(crate) const LAYER_EMBEDDINGS: [&str; 3] =
    ["model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"];
/// What makes a part of the states of a layer of its embeddings: the gate of these, the projection behind them, and the norm of what is
/// added.
pub(crate) const EMBEDDING_GATE: [&str; 3] =
    ["per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"];
/// The bias of the logits of experts, within a layer.
pub(crate) const LOGIT_BIAS: &str = "mlp.router.logit_bias";
/// Gate, up and down.
pub(crate) const EXPERTS: [&str; 3] =
    ["mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"];
/// Their biases.
pub(crate) const EXPERT_BIASES: [&str; 3] =
    ["mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias", "mlp.experts.down_proj_bias"];
/// The projections before and behind experts of another width than that of the hidden states.
pub(crate) const EXPERT_LATENTS: [&str; 2] = ["mlp.fc1_latent_proj", "mlp.fc2_latent_proj"];

/// The layer of the model that a tensor of this name is in; `None` for those outside of layers.
pub(crate) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

impl Config {
    /// The name and shape of every tensor of the model, as layers build them.
    pub fn tensors(&self) -> Vec<NamedShape> {
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
        if let Some(LayerEmbeddingSizes { tokens, width }) = self.parts.layer_embeddings {
            let all = self.num_hidden_layers * width;
            let shapes = [vec![tokens, all], vec![all, hidden], vec![width]];
            tensors.extend(LAYER_EMBEDDINGS.map(|name| format!("{name}.weight")).into_iter().zip(shapes));
        }
        (0..self.num_hidden_layers).for_each(|layer| tensors.extend(self.of_layer(layer)));
        tensors
    }

    /// The name and shape of every tensor that a training changes: all but the biases of choices and the factors of layers, which have no
    /// gradients.
    pub(crate) fn learned(&self) -> Vec<NamedShape> {
        let is_fixed = |name: &str| name.ends_with(CHOICE_BIAS) || name.ends_with(LAYER_SCALAR);
        self.tensors().into_iter().filter(|(name, _)| !is_fixed(name)).collect()
    }

    fn of_layer(&self, layer: usize) -> Vec<NamedShape> {
        let (hidden, inner) = (self.hidden_size, self.inner_of(layer));
        let Parts { mlp_bias, norms, .. } = self.parts;
        let named = |name: &str, parameter: &str| format!("model.layers.{layer}.{name}.{parameter}");
        let of_mamba = |heads: MambaHeads| {
            let of_layer = |(name, shape)| (format!("model.layers.{layer}.{name}"), shape);
            heads.tensors(hidden).into_iter().map(of_layer).collect::<Vec<NamedShape>>()
        };
        let mut tensors = match self.parts.mixer(layer) {
            MixerKind::None => Vec::new(),
            MixerKind::Attention => self.of_attention(layer, &named),
            MixerKind::Both(heads) => {
                self.of_attention(layer, &named).into_iter().chain(of_mamba(heads)).collect()
            }
            MixerKind::Latent(widths) => self.of_latent_attention(&widths, &named),
            MixerKind::DeltaNet(heads) => self.of_delta(heads, layer, &named),
            MixerKind::Mamba(heads) => of_mamba(heads),
            MixerKind::ShortConv { taps } => {
                let inputs = ["b_proj", "c_proj", "x_proj"];
                let linear = inputs.into_iter().chain(["out_proj"]);
                let linear =
                    linear.map(|name| (named(&format!("conv.{name}"), "weight"), vec![hidden, hidden]));
                linear.chain([(named("conv.conv", "weight"), vec![hidden, 1, taps])]).collect()
            }
        };
        let dense = [
            ("mlp.gate_proj", inner, hidden, mlp_bias),
            ("mlp.up_proj", inner, hidden, mlp_bias),
            ("mlp.down_proj", hidden, inner, mlp_bias),
        ];
        let experts = self.parts.experts(layer);
        let has_dense = experts.is_none_or(|experts| experts.beside_dense);
        if has_dense && self.parts.has_feed_forward(layer) {
            let gated = usize::from(!self.parts.gated);
            tensors.extend(linear_tensors(&dense[gated..], &named));
        }
        if let Some(experts) = experts {
            let Experts { count, hidden: inner, has_bias, logit_bias, biases, .. } = experts;
            let Experts { shared, shared_gate, names, beside_dense, latent, .. } = experts;
            tensors.push((named(ROUTER, "weight"), vec![*count, hidden]));
            tensors.extend(has_bias.then(|| (named(ROUTER, "bias"), vec![*count])));
            tensors.extend(logit_bias.then(|| (named(ROUTER, "logit_bias"), vec![*count])));
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
                tensors.extend(shapes.into_iter().skip(usize::from(!self.parts.gated)).map(of));
                tensors.extend(shared_gate.then(|| (named(gate, "weight"), vec![1, hidden])));
            }
            let into = latent.unwrap_or(hidden);
            if let Some(latent) = *latent {
                let shapes = [vec![latent, hidden], vec![hidden, latent]];
                tensors.extend(EXPERT_LATENTS.map(|module| named(module, "weight")).into_iter().zip(shapes));
            }
            let shapes = [[*inner, into], [*inner, into], [into, *inner]];
            let name = |name: &str| format!("model.layers.{layer}.{name}");
            tensors.extend(
                EXPERTS
                    .iter()
                    .zip(shapes)
                    .skip(usize::from(!experts.gate.has_gate()))
                    .map(|(part, [rows, columns])| (name(part), vec![*count, rows, columns])),
            );
            if *beside_dense {
                tensors.extend(BESIDE_DENSE.map(|norm| (named(norm, "weight"), vec![hidden])));
                tensors.push((named(ROUTER, "scale"), vec![hidden]));
                tensors.push((named(ROUTER, "per_expert_scale"), vec![*count]));
            }
            if *biases {
                let rows = EXPERT_BIASES.into_iter().zip([*inner, *inner, into]);
                tensors.extend(rows.map(|(part, rows)| (name(part), vec![*count, rows])));
            }
        }
        if let Some(LayerEmbeddingSizes { width, .. }) = self.parts.layer_embeddings {
            let shapes = [vec![width, hidden], vec![hidden, width], vec![hidden]];
            tensors.extend(EMBEDDING_GATE.map(|name| named(name, "weight")).into_iter().zip(shapes));
        }
        tensors.extend(
            self.parts.layer_scalar.then(|| (format!("model.layers.{layer}.{LAYER_SCALAR}"), vec![1])),
        );
        for name in norms.names().into_iter().flatten() {
            tensors.push((named(name, "weight"), vec![hidden]));
            let has_bias = self.parts.norm == NormKind::LayerWithBias;
            tensors.extend(has_bias.then(|| (named(name, "bias"), vec![hidden])));
        }
        tensors
    }

    /// Those of attention.
    fn of_attention(&self, layer: usize, named: &dyn Fn(&str, &str) -> String) -> Vec<NamedShape> {
        let hidden = self.hidden_size;
        let Heads { query, key_value, dim } = self.heads_of(layer);
        let Parts { qkv_bias, output_bias, qk_norm, gated_attention, .. } = self.parts;
        let queries = if gated_attention { 2 * query } else { query };
        let attention = [
            ("self_attn.q_proj", queries * dim, hidden, qkv_bias),
            ("self_attn.k_proj", key_value * dim, hidden, qkv_bias),
            ("self_attn.v_proj", key_value * dim, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, query * dim, output_bias),
        ];
        let is_of_keys = |name: &str| ["self_attn.k_proj", "self_attn.v_proj"].contains(&name);
        let has_keys = self.parts.key_source(layer).is_none();
        let is_there = |(name, ..): &&(&str, usize, usize, bool)| {
            (has_keys || !is_of_keys(name)) && (self.parts.has_values(layer) || *name != "self_attn.v_proj")
        };
        let attention: Vec<_> = attention.iter().filter(is_there).copied().collect();
        let mut tensors = linear_tensors(&attention, named);
        tensors.extend(self.parts.sinks.then(|| (named("self_attn", "sinks"), vec![query])));
        let norms =
            qk_norm.names().into_iter().zip(qk_norm.widths(self.heads_of(layer)).into_iter().flatten());
        for (name, width) in norms.take(if has_keys { 2 } else { 1 }) {
            tensors.push((named(&format!("self_attn.{name}"), "weight"), vec![width]));
        }
        tensors
    }

    /// Those of latent attention.
    fn of_latent_attention(
        &self,
        widths: &LatentWidths,
        named: &dyn Fn(&str, &str) -> String,
    ) -> Vec<NamedShape> {
        let mut tensors = linear_tensors(&self.of_latents(widths), named);
        let query = widths.query.map(|width| (named("self_attn.q_a_layernorm", "weight"), vec![width]));
        tensors.extend(query);
        tensors.push((named("self_attn.kv_a_layernorm", "weight"), vec![widths.rank]));
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

    /// Those of a layer with the gated delta rule.
    fn of_delta(
        &self,
        heads: DeltaHeads,
        layer: usize,
        named: &dyn Fn(&str, &str) -> String,
    ) -> Vec<NamedShape> {
        let (hidden, [keys, values]) = (self.hidden_size, heads.channels());
        let inputs: &[(&str, usize)] = match heads.by_key_head {
            true => &[("in_proj_qkvz", 2 * keys + 2 * values), ("in_proj_ba", 2 * heads.value)],
            false => &[
                ("in_proj_q", keys),
                ("in_proj_k", keys),
                ("in_proj_v", values),
                ("in_proj_z", values),
                ("in_proj_b", heads.value),
                ("in_proj_a", heads.value),
            ],
        };
        let of = |module: &str| named(&format!("linear_attn.{module}"), "weight");
        let mut tensors: Vec<NamedShape> =
            inputs.iter().map(|(name, rows)| (of(name), vec![*rows, hidden])).collect();
        tensors.push((of("out_proj"), vec![hidden, values]));
        tensors.push((of("norm"), vec![heads.value_dim]));
        let convs = [("conv1d_q", keys), ("conv1d_k", keys), ("conv1d_v", values)];
        tensors.extend(convs.map(|(name, rows)| (of(name), vec![rows, 1, heads.taps])));
        let of_heads = ["A_log", "dt_bias"];
        tensors.extend(
            of_heads.map(|name| (format!("model.layers.{layer}.linear_attn.{name}"), vec![heads.value])),
        );
        tensors
    }

    /// Whether a tensor makes keys or values in a layer that uses those of another, as some files have them.
    pub(crate) fn is_unused(&self, name: &str) -> bool {
        let of_layer = || {
            let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
            let (module, _) = rest.strip_prefix("self_attn.")?.split_once('.')?;
            let is_of_keys = ["k_proj", "v_proj", "k_norm", "v_norm"].contains(&module);
            Some(is_of_keys && self.parts.key_source(layer.parse().ok()?).is_some())
        };
        of_layer().unwrap_or(false)
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
        let has_none = |layer| self.parts.experts(layer).is_none_or(|experts| experts.beside_dense);
        let is_dense = |layer| self.parts.has_feed_forward(layer) && has_none(layer);
        (0..self.num_hidden_layers).any(is_dense)
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

/// The weights and biases of linear layers: the name of each, its rows and columns, and whether it has a bias.
fn linear_tensors(
    layers: &[(&str, usize, usize, bool)],
    named: &dyn Fn(&str, &str) -> String,
) -> Vec<NamedShape> {
    let of_layer = |&(name, rows, columns, has_bias): &(&str, usize, usize, bool)| {
        let weight = (named(name, "weight"), vec![rows, columns]);
        [weight].into_iter().chain(has_bias.then(|| (named(name, "bias"), vec![rows])))
    };
    layers.iter().flat_map(of_layer).collect()
}
