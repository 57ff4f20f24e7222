//! The tensors of a model: their names and shapes, as layers build them and as files have them.

use candle_core::Tensor;
use candle_shard::nn::Heads;

use super::Config;
use super::experts::{Experts, StackLayout, StackNames};
use super::mixers::{DeltaHeads, MixerKind};
use super::parts::{FUSED_GATE, FUSED_QKV, FUSED_SHARED, LatentWidths, NormKind, Parts};

/// The name and shape of a tensor.
type NamedShape = (String, Vec<usize>);

/// What layers call the router and the stacked weights of experts, within a layer.
pub(crate) const ROUTER: &str = "mlp.router";
/// The norms of a layer whose experts are beside another network: behind that one, before the experts, and behind these.
pub(crate) const BESIDE_DENSE: [&str; 3] =
    ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"];
/// The bias of the choice of experts, within a layer. Ranks hold it as f32.
pub(crate) const CHOICE_BIAS: &str = "mlp.router.bias";
/// The factor of the states behind a layer, within it. It is not learned.
pub(crate) const LAYER_SCALAR: &str = "layer_scalar";
/// The bias of the logits of experts, within a layer.
pub(crate) const LOGIT_BIAS: &str = "mlp.router.logit_bias";
/// Gate, up and down.
pub(crate) const EXPERTS: [&str; 3] =
    ["mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"];
/// Their biases.
pub(crate) const EXPERT_BIASES: [&str; 3] =
    ["mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias", "mlp.experts.down_proj_bias"];

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
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let Parts { mlp_bias, norms, .. } = self.parts;
        let named = |name: &str, parameter: &str| format!("model.layers.{layer}.{name}.{parameter}");
        let mut tensors = match self.parts.mixer(layer) {
            MixerKind::None => Vec::new(),
            MixerKind::Attention => self.of_attention(layer, &named),
            MixerKind::Latent(widths) => self.of_latent_attention(&widths, &named),
            MixerKind::DeltaNet(heads) => self.of_delta(heads, layer, &named),
            MixerKind::Mamba(heads) => {
                let of_layer = |(name, shape)| (format!("model.layers.{layer}.{name}"), shape);
                heads.tensors(hidden).into_iter().map(of_layer).collect()
            }
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
            let Experts { shared, shared_gate, names, beside_dense, .. } = experts;
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
            if *beside_dense {
                tensors.extend(BESIDE_DENSE.map(|norm| (named(norm, "weight"), vec![hidden])));
                tensors.push((named(ROUTER, "scale"), vec![hidden]));
                tensors.push((named(ROUTER, "per_expert_scale"), vec![*count]));
            }
            if *biases {
                let rows = EXPERT_BIASES.into_iter().zip([*inner, *inner, hidden]);
                tensors.extend(rows.map(|(part, rows)| (name(part), vec![*count, rows])));
            }
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
        let is_there = |(name, ..): &&(&str, usize, usize, bool)| {
            self.parts.has_values(layer) || *name != "self_attn.v_proj"
        };
        let attention: Vec<_> = attention.iter().filter(is_there).copied().collect();
        let mut tensors = linear_tensors(&attention, named);
        tensors.extend(self.parts.sinks.then(|| (named("self_attn", "sinks"), vec![query])));
        for (name, width) in
            qk_norm.names().into_iter().zip(qk_norm.widths(self.heads_of(layer)).into_iter().flatten())
        {
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
                MixerKind::Mamba(heads) => {
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
        let (layer, module) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let Experts { count, names, .. } = self.parts.experts(layer.parse().ok()?)?;
        if names.stacks.is_some() {
            return None;
        }
        let part = EXPERTS.iter().position(|part| *part == module)?;
        let of = |expert: usize| {
            format!("model.layers.{layer}.{}.{expert}.{}.weight", names.experts, names.layers[part])
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
        let own = || {
            let name = self.renamed(name, |(own, stored)| (own, stored));
            match name.strip_prefix("model.") {
                Some(rest) => format!("{}.{rest}", self.parts.model_name),
                None => name,
            }
        };
        let Some(experts) = &self.parts.experts else { return own() };
        let layer = |parameter: &str| name.strip_suffix(&format!(".{ROUTER}.{parameter}"));
        match (layer("weight"), layer("bias"), layer("logit_bias")) {
            (Some(layer), ..) => format!("{layer}.{}.weight", experts.names.router),
            (_, Some(layer), _) => format!("{layer}.{}", experts.names.bias),
            (.., Some(layer)) => format!("{layer}.{}.bias", experts.names.router),
            _ => own(),
        }
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
                None => tensors.push((self.stored_name(&name), shape)),
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
