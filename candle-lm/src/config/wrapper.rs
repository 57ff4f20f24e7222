//! Models for images and text. Only their language model runs. Its config is in `text_config`, or among their own fields.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use super::fields::{are_of, shortened};

/// A kind of such models.
struct Wrapper {
    model_type: &'static str,
    architecture: &'static str,
    /// The families of the language model; `text_config` says it where there are several, and else it is the first.
    families: &'static [&'static str],
}

const WRAPPERS: [Wrapper; 14] = [
    Wrapper {
        model_type: "gemma3",
        architecture: "Gemma3ForConditionalGeneration",
        families: &["gemma3_text"],
    },
    Wrapper {
        model_type: "gemma4",
        architecture: "Gemma4ForConditionalGeneration",
        families: &["gemma4_text"],
    },
    Wrapper {
        model_type: "gemma4_unified",
        architecture: "Gemma4UnifiedForConditionalGeneration",
        families: &["gemma4_text"],
    },
    Wrapper {
        model_type: "llama4",
        architecture: "Llama4ForConditionalGeneration",
        families: &["llama4_text"],
    },
    Wrapper {
        model_type: "mistral3",
        architecture: "Mistral3ForConditionalGeneration",
        families: &["mistral", "ministral3", "mistral4"],
    },
    Wrapper { model_type: "qwen2_vl", architecture: "Qwen2VLForConditionalGeneration", families: &["qwen2"] },
    Wrapper {
        model_type: "qwen2_5_vl",
        architecture: "Qwen2_5_VLForConditionalGeneration",
        families: &["qwen2"],
    },
    Wrapper { model_type: "qwen3_vl", architecture: "Qwen3VLForConditionalGeneration", families: &["qwen3"] },
    Wrapper {
        model_type: "qwen3_vl_moe",
        architecture: "Qwen3VLMoeForConditionalGeneration",
        families: &["qwen3_moe"],
    },
    Wrapper {
        model_type: "qwen3_5",
        architecture: "Qwen3_5ForConditionalGeneration",
        families: &["qwen3_5_text"],
    },
    Wrapper {
        model_type: "qwen3_5_moe",
        architecture: "Qwen3_5MoeForConditionalGeneration",
        families: &["qwen3_5_moe_text"],
    },
    Wrapper {
        model_type: "kimi_k25",
        architecture: "KimiK25ForConditionalGeneration",
        families: &["deepseek_v3", "kimi_k2"],
    },
    Wrapper {
        model_type: "exaone4_5",
        architecture: "Exaone4_5_ForConditionalGeneration",
        families: &["exaone4"],
    },
    Wrapper {
        model_type: "lfm2_vl",
        architecture: "Lfm2VlForConditionalGeneration",
        families: &["lfm2", "lfm2_moe"],
    },
];

/// Words in the names of fields outside of `text_config` that say how images become tokens.
const WORDS_OF_IMAGES: [&str; 16] = [
    "audio",
    "boa_",
    "boi_",
    "downsample",
    "eoa_",
    "eoi_",
    "ignore_index",
    "image",
    "patch",
    "pixel",
    "project",
    "spatial_merge",
    "thumbnail",
    "tile",
    "video",
    "vision",
];

/// Fields among those of texts that say the same.
const OF_IMAGES: [&str; 8] = [
    "image_token_id",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
    // How positions of images are shared out. A text has the same position in all shares.
    "mrope_interleaved",
    "mrope_section",
];

/// Fields that are inside or outside, whichever says something.
const OF_BOTH: [&str; 7] = [
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
];

/// The parts of models that turn images into tokens, by the beginnings of their tensors' names.
const PARTS_OF_IMAGES: [&str; 9] = [
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "vision_embedder.",
    "vision_model.",
    "vision_tower.",
    "multi_modal_projector.",
    "mm_projector.",
    "visual.",
];

/// The fields of the language model of a config, and whether there is more than that.
///
/// # Errors
/// If the config is of a known kind and says two things; the field is named.
pub(super) fn unwrapped(mut fields: Map<String, Value>) -> Result<(Map<String, Value>, bool)> {
    let wrapper =
        fields.get("model_type").and_then(|kind| WRAPPERS.iter().find(|wrapper| kind == wrapper.model_type));
    let Some(Wrapper { model_type, architecture, families }) = wrapper else { return Ok((fields, false)) };
    let is_own = |said: &Value| said.is_null() || are_of(said, architecture);
    let said = fields.remove("architectures").unwrap_or_default();
    ensure!(
        is_own(&said),
        "architectures {said} is not supported for {model_type}; supported: [{architecture:?}]"
    );
    let mut text = match fields.remove("text_config") {
        Some(Value::Object(mut text)) => {
            if text.get("architectures").is_some_and(is_own) {
                text.remove("architectures");
            }
            let kind = text.get("model_type").and_then(Value::as_str).map(str::to_owned);
            let own = [model_type.to_string(), format!("{model_type}_text")];
            let family = kind.filter(|kind| !own.contains(kind)).unwrap_or_else(|| families[0].into());
            ensure!(
                families.contains(&&*family),
                "text_config has model_type {family:?}; expected {} in {model_type}",
                families.join(" or ")
            );
            text.insert("model_type".into(), json!(family));
            fields.remove("model_type");
            fields.retain(|name, _| !WORDS_OF_IMAGES.iter().any(|word| name.contains(word)));
            text
        }
        None | Some(Value::Null) => Map::from_iter([("model_type".to_owned(), json!(families[0]))]),
        Some(other) => anyhow::bail!("text_config is {}; expected an object", shortened(&other)),
    };
    // Null is a value of other fields: no window.
    text.retain(|name, value| !(value.is_null() && OF_BOTH.contains(&name.as_str())));
    // The output layer is tied if either says so; where it has a tensor of its own with other values, that counts.
    let is_tied = [&text, &fields].map(|fields| fields.get("tie_word_embeddings").cloned());
    if is_tied.iter().flatten().any(|said| *said == json!(true)) {
        text.insert("tie_word_embeddings".into(), json!(true));
    }
    for (name, value) in fields {
        // What the whole says of the text is said outside: special tokens, and codes of weights.
        if ["bos_token_id", "eos_token_id"].contains(&name.as_str()) && !value.is_null() {
            text.insert(name, value);
        } else {
            text.entry(name).or_insert(value);
        }
    }
    // Files leave out what transformers has by default.
    let has_base = ["rope_theta", "rope_parameters"]
        .iter()
        .any(|name| text.get(*name).is_some_and(|said| !said.is_null()));
    let absent = match *model_type {
        "gemma3" => json!({
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "vocab_size": 262_208,
        }),
        // Its text has no embeddings of layers.
        "gemma4_unified" => json!({"hidden_size_per_layer_input": 0, "sliding_window": 1024}),
        "qwen2_vl" | "qwen2_5_vl" if !has_base => json!({"max_window_layers": 80, "rope_theta": 1_000_000.0}),
        "qwen2_vl" | "qwen2_5_vl" => json!({"max_window_layers": 80}),
        "qwen3_vl" | "qwen3_vl_moe" if !has_base => json!({"rope_theta": 500_000.0}),
        _ => json!({}),
    };
    for (name, value) in absent.as_object().into_iter().flatten() {
        text.entry(name).or_insert_with(|| value.clone());
    }
    text.retain(|name, _| !OF_IMAGES.contains(&name.as_str()));
    for name in ["rope_parameters", "rope_scaling"] {
        let Some(rope) = text.get_mut(name).and_then(Value::as_object_mut) else { continue };
        rope.retain(|name, _| !OF_IMAGES.contains(&name.as_str()));
        for kind in ["rope_type", "type"] {
            if rope.get(kind).is_some_and(|kind| kind == "mrope") {
                rope.insert(kind.into(), json!("default"));
            }
        }
    }
    Ok((text, true))
}

/// What is said of the quantization of such a model, with the names that modules have in its language model alone.
pub(crate) fn quantization_in_text(said: Value) -> Value {
    let Value::Object(said) = said else { return said };
    let own = |(name, value): (String, Value)| {
        let renamed = Some(&name).filter(|_| value.is_object()).and_then(|name| name_in_text(name));
        (renamed.unwrap_or(name), value)
    };
    Value::Object(said.into_iter().map(own).collect())
}

/// The name that a tensor of such a model has in its language model alone; `None` for those of images.
pub(crate) fn name_in_text(name: &str) -> Option<String> {
    let inner = name.strip_prefix("model.").unwrap_or(name);
    if PARTS_OF_IMAGES.iter().any(|part| inner.starts_with(part)) {
        return None;
    }
    // `model.language_model.layers`, or `language_model.model.layers` and `language_model.lm_head` in older files.
    Some(match (name.strip_prefix("model.language_model."), name.strip_prefix("language_model.")) {
        (Some(rest), _) => format!("model.{rest}"),
        (None, Some(rest)) => rest.to_owned(),
        (None, None) => name.to_owned(),
    })
}
