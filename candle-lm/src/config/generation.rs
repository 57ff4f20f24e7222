//! What a model's `generation_config.json` says.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};
use candle_shard::regular;
use serde_json::Value;

use super::TokenIds;
use super::fields::shortened;

/// What of it matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerationConfig {
    /// The tokens that end a text.
    pub ends: Vec<u32>,
    /// What it asks for that this program does not do, a sentence each.
    pub unmet: Vec<String>,
}

/// Fields that ask for nothing: they describe the file, or the command line decides them.
const HARMLESS: [&str; 14] = [
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "do_sample",
    "max_length",
    "max_new_tokens",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "temperature",
    "top_p",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
];

/// Fields that flags of the command line are for.
const FLAGS: [(&str, &str); 3] =
    [("min_p", "--min-p"), ("repetition_penalty", "--repetition-penalty"), ("top_k", "--top-k")];

/// Fields that change nothing unless `do_sample` is true.
const SAMPLING: [&str; 5] = ["epsilon_cutoff", "eta_cutoff", "min_p", "top_k", "typical_p"];

impl GenerationConfig {
    /// That of the model in `folder`; nothing if it has none.
    ///
    /// # Errors
    /// If there is one that cannot be read; the file and the field are named.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("generation_config.json");
        let text = match regular::read_text(&path, regular::CONFIG) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            text => text.with_context(|| format!("{}", path.display()))?,
        };
        Self::parse(&text).with_context(|| format!("{}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        // In the order of their names, whatever order JSON objects keep.
        let fields: BTreeMap<String, Value> = serde_json::from_str(text)?;
        let ends = fields
            .get("eos_token_id")
            .map(|value| TokenIds::read("eos_token_id", value))
            .transpose()?
            .flatten();
        let samples = fields.get("do_sample").is_some_and(|value| value == true);
        let asks = |(name, value): &(&String, &Value)| {
            let name = name.as_str();
            let is_harmless = HARMLESS.contains(&name) || (SAMPLING.contains(&name) && !samples);
            name != "eos_token_id" && !is_harmless && !is_neutral(name, value)
        };
        let unmet = fields.iter().filter(asks).map(|(name, value)| {
            let value = shortened(value);
            let flag = FLAGS.iter().find(|(field, _)| field == name);
            let then = flag.map_or("this program does not do".into(), |(_, flag)| format!("{flag} would do"));
            format!("generation_config.json has {name} {value}, which {then}")
        });
        Ok(Self { unmet: unmet.collect(), ends: ends.as_ref().map_or(&[][..], TokenIds::ids).to_vec() })
    }
}

/// Whether a field asks for what happens without it.
fn is_neutral(name: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        // A penalty of 1, or one beam, is none; so is 0 of anything else.
        _ => {
            let factors = ["repetition_penalty", "encoder_repetition_penalty", "length_penalty", "num_beams"];
            let factors =
                [&factors[..], &["num_beam_groups", "num_return_sequences", "guidance_scale", "typical_p"]]
                    .concat();
            value.as_f64() == Some(if factors.contains(&name) { 1.0 } else { 0.0 })
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::GenerationConfig;

    #[test]
    fn ends_are_one_or_several_and_what_is_not_done_is_said() {
        let read = |text: &str| GenerationConfig::parse(text).unwrap();
        assert_eq!(read("{}"), GenerationConfig::default());
        assert_eq!(
            read(r#"{"eos_token_id": 7, "top_k": 50, "num_beams": 1, "suppress_tokens": null}"#).ends,
            [7]
        );
        let asks = read(
            r#"{"eos_token_id": [7, 8], "repetition_penalty": 1.1, "min_length": 0, "length_penalty": 1.0}"#,
        );
        assert_eq!(asks.ends, [7, 8]);
        assert!(asks.unmet.len() == 1 && asks.unmet[0].contains("repetition_penalty 1.1"), "{asks:?}");
        let samples = read(
            r#"{"do_sample": true, "top_k": 50, "min_p": 0.1, "typical_p": 1.0, "eta_cutoff": 0.0, "top_p": 0.9}"#,
        );
        assert_eq!(samples.unmet.len(), 2, "{samples:?}");
        for want in ["min_p 0.1", "top_k 50"] {
            assert!(samples.unmet.iter().any(|unmet| unmet.contains(want)), "{samples:?}");
        }
        for wrong in [r#"{"eos_token_id": "</s>"}"#, r#"{"eos_token_id": [-1]}"#, "[]"] {
            assert!(GenerationConfig::parse(wrong).is_err(), "{wrong}");
        }
    }
}
