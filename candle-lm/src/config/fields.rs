//! Which fields of a `config.json` are known, and what each may say.
//!
//! A field that nobody reads may stand for something that the model computes. So each is known here, or says what switches something off,
//! or the model is refused. `unknown.rs` decides about those that are not known.

use std::borrow::Cow;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::families::{Family, families, refusal};
use super::unknown::{UnknownFields, is_full_attention};

/// What is done about a field.
#[derive(Clone, Copy)]
pub(super) enum FieldRule {
    /// It is read.
    Used,
    /// It changes nothing that is computed here.
    Harmless,
    /// It may only say this, as one that is absent does.
    Only(Plain),
    /// It may only repeat what this other field says.
    Same(&'static str),
}

/// A value that a table can hold.
#[derive(Clone, Copy)]
pub(super) enum Plain {
    Null,
    False,
    True,
    Zero,
    One,
    Text(&'static str),
}

/// A field and what is done about it.
type FieldRow = (&'static str, FieldRule);

/// The rows of two tables.
pub(super) const fn joined<const A: usize, const B: usize, const N: usize>(
    first: [FieldRow; A],
    second: [FieldRow; B],
) -> [FieldRow; N] {
    assert!(A + B == N, "the length is not the sum of both");
    let mut all = [("", FieldRule::Used); N];
    let mut at = 0;
    while at < N {
        all[at] = if at < A { first[at] } else { second[at - A] };
        at += 1;
    }
    all
}

/// The fields that all families have.
static COMMON: &[(&str, FieldRule)] = {
    use FieldRule::{Harmless, Only, Used};
    use Plain::{False, Null, One, Text, True};
    &[
        ("architectures", Used),
        ("bos_token_id", Used),
        ("eos_token_id", Used),
        ("head_dim", Used),
        ("hidden_size", Used),
        ("intermediate_size", Used),
        ("max_position_embeddings", Used),
        ("model_type", Used),
        ("num_attention_heads", Used),
        ("num_hidden_layers", Used),
        ("num_key_value_heads", Used),
        ("rms_norm_eps", Used),
        ("rope_parameters", Used),
        ("rope_scaling", Used),
        ("rope_theta", Used),
        ("tie_word_embeddings", Used),
        ("vocab_size", Used),
        ("add_cross_attention", Only(False)),
        ("attention_bias", Only(False)),
        ("cross_attention_hidden_size", Only(Null)),
        ("hidden_act", Only(Text("silu"))),
        ("is_causal", Only(True)),
        ("is_decoder", Harmless),
        ("is_encoder_decoder", Only(False)),
        // Without a window in any layer.
        ("max_window_layers", Harmless),
        ("mlp_bias", Only(False)),
        ("partial_rotary_factor", Only(One)),
        ("qk_layernorm", Only(False)),
        ("quantization_config", Used),
        ("rope_interleaved", Only(False)),
        ("sliding_window", Only(Null)),
        ("tie_encoder_decoder", Only(False)),
        ("use_bidirectional_attention", Only(False)),
        ("use_qk_norm", Only(False)),
        ("use_sliding_window", Only(False)),
        // Those of generate() of older transformers, which the command line decides.
        ("bad_words_ids", Harmless),
        ("begin_suppress_tokens", Harmless),
        ("decoder_start_token_id", Harmless),
        ("diversity_penalty", Harmless),
        ("do_sample", Harmless),
        ("early_stopping", Harmless),
        ("encoder_no_repeat_ngram_size", Harmless),
        ("exponential_decay_length_penalty", Harmless),
        ("forced_bos_token_id", Harmless),
        ("forced_eos_token_id", Harmless),
        ("length_penalty", Harmless),
        ("max_length", Harmless),
        ("max_new_tokens", Harmless),
        ("min_length", Harmless),
        ("no_repeat_ngram_size", Harmless),
        ("num_beam_groups", Harmless),
        ("num_beams", Harmless),
        ("num_return_sequences", Harmless),
        ("output_scores", Harmless),
        ("remove_invalid_values", Harmless),
        ("repetition_penalty", Harmless),
        ("return_dict_in_generate", Harmless),
        ("sep_token_id", Harmless),
        ("suppress_tokens", Harmless),
        ("temperature", Harmless),
        ("top_k", Harmless),
        ("top_p", Harmless),
        ("typical_p", Harmless),
        // Hints, defaults of generation that the command line decides, and what only classifiers and training have.
        ("_attn_implementation", Harmless),
        ("_attn_implementation_autoset", Harmless),
        ("_attn_implementation_internal", Harmless),
        ("_commit_hash", Harmless),
        ("_flash_attn_2_enabled", Harmless),
        ("_name_or_path", Harmless),
        ("attn_implementation", Harmless),
        ("auto_map", Harmless),
        ("chunk_size_feed_forward", Harmless),
        // Another attention over very long texts in one server. transformers does not read it.
        ("dual_chunk_attention_config", Harmless),
        ("dtype", Harmless),
        ("id2label", Harmless),
        ("initializer_range", Harmless),
        ("is_llama_config", Harmless),
        ("label2id", Harmless),
        ("max_model_len", Harmless),
        ("max_sequence_length", Harmless),
        ("model_max_length", Harmless),
        ("output_attentions", Harmless),
        ("output_hidden_states", Harmless),
        ("pad_token_id", Harmless),
        // Parts of the same products, one after the other.
        ("pretraining_tp", Harmless),
        ("problem_type", Harmless),
        ("return_dict", Harmless),
        ("task_specific_params", Harmless),
        ("tokenizer_class", Harmless),
        ("torch_dtype", Harmless),
        ("torchscript", Harmless),
        ("transformers.js_config", Harmless),
        ("transformers_version", Harmless),
        ("use_bfloat16", Harmless),
        ("use_cache", Harmless),
    ]
};

/// The fields of a `config.json`. All of them are known, or change nothing.
pub(super) struct Fields {
    fields: Map<String, Value>,
    pub(super) family: &'static Family,
    /// What is said of fields that change nothing here, a sentence each.
    pub(super) notes: Vec<String>,
}

impl Fields {
    /// Checks that the config is of a known kind of model and says nothing that is not known, but in the fields `ignored`.
    ///
    /// # Errors
    /// If it does; all such fields and their values are named.
    pub(super) fn new(
        fields: Map<String, Value>,
        mut unknown: UnknownFields<'_>,
        ignored: &[String],
    ) -> Result<Self> {
        let known = || families().map(|family| family.model_type).collect::<Vec<_>>().join(", ");
        let Some(model_type) = fields.get("model_type") else {
            bail!("there is no model_type, which says what is computed; supported: {}", known());
        };
        if let Some(reason) = refusal(model_type) {
            bail!("model_type {model_type} is not supported: {reason}");
        }
        let family = families().find(|family| model_type == family.model_type);
        let family = family
            .with_context(|| format!("model_type {model_type} is not supported; supported: {}", known()))?;
        if let Some(architectures) = fields.get("architectures").filter(|said| !said.is_null()) {
            ensure!(
                are_of(architectures, family.architecture),
                "architectures {architectures} is not supported; supported: [{:?}]",
                family.architecture
            );
        }
        for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            // A width of 0 is that of a part that is not there, as are 0 experts, and an empty list names no layer.
            let counts = ["num_nextn_predict_layers", "mtp_num_hidden_layers"];
            let is_part =
                name.ends_with("_size") || name.contains("expert") || counts.contains(&name.as_str());
            let is_zero = *value == 0 && is_part;
            let is_absent = is_zero || value.as_array().is_some_and(Vec::is_empty);
            match family.fields.iter().chain(COMMON).find(|(known, _)| known == name) {
                Some((_, FieldRule::Used | FieldRule::Harmless)) => {}
                Some((_, FieldRule::Only(only))) if only.is(value) => {}
                Some((_, FieldRule::Only(only))) => {
                    let name = unknown.name_of(name);
                    unknown
                        .refuse(&name, format!("{name} is {value}, and only {} is supported", only.text()));
                }
                Some((_, FieldRule::Same(other)))
                    if fields.get(*other).is_some_and(|other| same(value, other)) => {}
                Some((_, FieldRule::Same(other))) => {
                    let said = fields.get(*other).cloned().unwrap_or_default();
                    let name = unknown.name_of(name);
                    let reason =
                        format!("{name} is {}, and {other} is {}", shortened(value), shortened(&said));
                    unknown.refuse(&name, reason);
                }
                // Where a family has a switch, another one may always do what it switches.
                None if families().any(|other| other.has(name))
                    && !is_full_attention(value)
                    && !is_absent =>
                {
                    let name = unknown.name_of(name);
                    unknown
                        .refuse(&name, format!("{name} ({}) is a field of other families", shortened(value)));
                }
                None => unknown.judge(&unknown.name_of(name), value),
            }
        }
        let notes = unknown.settle(ignored, &format!("model_type {model_type}"))?;
        Ok(Self { fields, family, notes })
    }

    /// A value, if there is one that is not null.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// Whether a field is there, be it null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// A sliding window: none if the field is null, and `absent` without the field.
    pub(super) fn window(&self, name: &str, absent: Option<usize>) -> Result<Option<usize>> {
        if self.has(name) { self.optional_size(name, super::MOST) } else { Ok(absent) }
    }

    /// Every how many layers one sees all tokens, if the fields say so.
    pub(super) fn pattern(&self, layers: usize) -> Result<Option<usize>> {
        let names = ["sliding_window_pattern", "_sliding_window_pattern"];
        names.iter().find_map(|name| self.optional_size(name, layers.max(64)).transpose()).transpose()
    }

    /// For each layer whether it has a sliding window, if `layer_types` says so; of any number of layers for
    /// `usize::MAX`.
    pub(super) fn layer_types(&self, layers: usize) -> Result<Option<Vec<bool>>> {
        self.by_layer_type(
            layers,
            &[("full_attention", false), ("sliding_attention", true), ("attention", false)],
        )
    }

    /// What `known` has for the name of each layer in `layer_types`, if there is such a list; of any number of layers for `usize::MAX`.
    ///
    /// # Errors
    /// If a name is not known, or there are not as many as layers.
    pub(super) fn by_layer_type<T: Copy>(
        &self,
        layers: usize,
        known: &[(&str, T)],
    ) -> Result<Option<Vec<T>>> {
        let Some(list) = self.get("layer_types") else { return Ok(None) };
        let one = |value: &Value| known.iter().find(|(name, _)| value == name).map(|(_, kind)| *kind);
        let kinds: Option<Vec<T>> = list.as_array().and_then(|list| list.iter().map(one).collect());
        let kinds = kinds.filter(|kinds| layers == usize::MAX || kinds.len() == layers);
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        let said =
            || format!("layer_types is {}; expected {} for each layer", shortened(list), names.join(" or "));
        kinds.map(Some).with_context(said)
    }

    /// For each of so many layers whether a list of their numbers has it, if there is such a list.
    pub(super) fn layers(&self, name: &str, layers: usize) -> Result<Option<Vec<bool>>> {
        let Some(list) = self.get(name) else { return Ok(None) };
        let number = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|&layer| layer < layers);
        let listed: Option<Vec<usize>> = list.as_array().and_then(|list| list.iter().map(number).collect());
        let said = || format!("{name} is {}; expected numbers of the {layers} layers", shortened(list));
        let listed = listed.with_context(said)?;
        Ok(Some((0..layers).map(|layer| listed.contains(&layer)).collect()))
    }

    /// A positive number, if it is there.
    pub(super) fn optional_positive(&self, name: &str) -> Result<Option<f64>> {
        self.get(name).map(|value| positive(name, value)).transpose()
    }

    /// A number that is not negative, if it is there.
    pub(super) fn factor(&self, name: &str) -> Result<Option<f64>> {
        let read = |value: &Value| {
            let number = value.as_f64().filter(|number| number.is_finite() && *number >= 0.0);
            number.with_context(|| {
                format!("{name} is {}; expected a number that is not negative", shortened(value))
            })
        };
        self.get(name).map(read).transpose()
    }

    /// Returns whether only a share of each head may be turned.
    pub(super) fn turns_a_share(&self) -> bool {
        matches!(self.family.rule("partial_rotary_factor"), Some(FieldRule::Used))
    }

    /// A whole number from 1 to `most`, if it is there.
    pub(super) fn optional_size(&self, name: &str, most: usize) -> Result<Option<usize>> {
        let size = |value: &Value| {
            let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
            let size = size.filter(|size| (1..=most).contains(size));
            size.with_context(|| {
                format!("{name} is {}; expected a whole number from 1 to {most}", shortened(value))
            })
        };
        self.get(name).map(size).transpose()
    }

    /// A whole number from 0 to `most`, if it is there.
    pub(super) fn optional_count(&self, name: &str, most: usize) -> Result<Option<usize>> {
        match self.get(name) {
            Some(value) if *value == json!(0) => Ok(Some(0)),
            _ => self.optional_size(name, most),
        }
    }

    /// A whole number from 1 to `most`.
    pub(super) fn size(&self, name: &str, most: usize) -> Result<usize> {
        self.optional_size(name, most)?.with_context(|| format!("there is no {name}"))
    }

    /// A positive number.
    pub(super) fn positive(&self, name: &str) -> Result<f64> {
        positive(name, self.get(name).with_context(|| format!("there is no {name}"))?)
    }

    /// A switch, off if it is absent.
    pub(super) fn switch(&self, name: &str) -> Result<bool> {
        self.switch_or(name, false)
    }

    /// A switch, or `absent` without the field.
    pub(super) fn switch_or(&self, name: &str, absent: bool) -> Result<bool> {
        let switch = |value: &Value| {
            value.as_bool().with_context(|| format!("{name} is {value}; expected true or false"))
        };
        self.get(name).map_or(Ok(absent), switch)
    }
}

/// A config in which numbers that JSON does not have are written as newer versions of transformers write them. Older ones write the words
/// of Python.
pub(super) fn without_infinity(text: &str) -> Cow<'_, str> {
    if !text.contains("Infinity") {
        return text.into();
    }
    let (mut made, mut is_text, mut rest) = (String::with_capacity(text.len() + 64), false, text);
    while let Some(one) = rest.chars().next() {
        let word = ["-Infinity", "Infinity"].into_iter().find(|word| !is_text && rest.starts_with(word));
        match word {
            Some(word) => {
                made.push_str(&json!({ "__float__": word }).to_string());
                rest = &rest[word.len()..];
            }
            None => {
                // What a backslash protects ends no text.
                let len = match one {
                    '\\' if is_text => 1 + rest.chars().nth(1).map_or(0, char::len_utf8),
                    _ => one.len_utf8(),
                };
                is_text ^= one == '"';
                made.push_str(&rest[..len]);
                rest = &rest[len..];
            }
        }
    }
    made.into()
}

/// Whether a list of architectures has this one alone. The first files of Llama, ERNIE and Kimi have other capitals or underscores.
pub(super) fn are_of(architectures: &Value, architecture: &str) -> bool {
    let plain = |name: &str| name.replace('_', "").to_lowercase();
    let is_own = |name: &Value| name.as_str().is_some_and(|name| plain(name) == plain(architecture));
    architectures.as_array().is_some_and(|list| list.iter().all(is_own))
}

/// Whether two values are equal, or equal numbers.
fn same(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

/// A number that is finite and more than 0.
pub(super) fn positive(name: &str, value: &Value) -> Result<f64> {
    let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
    number.with_context(|| format!("{name} is {}; expected a number that is more than 0", shortened(value)))
}

/// A value as text for an error, not the whole of a long one.
pub(super) fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

impl Plain {
    fn is(&self, value: &Value) -> bool {
        match *self {
            Self::Null => value.is_null(),
            Self::False => *value == Value::Bool(false),
            Self::True => *value == Value::Bool(true),
            Self::Zero => value.as_f64() == Some(0.0),
            Self::One => value.as_f64() == Some(1.0),
            Self::Text(text) => value == text,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Null => "null".into(),
            Self::False => "false".into(),
            Self::True => "true".into(),
            Self::Zero => "0".into(),
            Self::One => "1".into(),
            Self::Text(text) => format!("{text:?}"),
        }
    }
}
