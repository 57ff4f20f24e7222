//! Fields that are not known: what could change the numbers of a model is refused, and the rest is noted.

use anyhow::{Result, ensure};
use serde_json::Value;

use super::fields::shortened;

/// What is found of the fields of a file that are not known.
pub(crate) struct UnknownFields<'a> {
    /// What the file calls a field of a `config.json`.
    name_of: &'a dyn Fn(&str) -> String,
    /// A field by its name in the file, and why it is refused.
    refused: Vec<(String, String)>,
    notes: Vec<String>,
}

/// Markers of tools begin with this.
const MARKER: &str = "unsloth_";
/// What only training uses ends with these.
const DROPOUTS: [&str; 5] = ["dropout", "dropout_prob", "dropout_rate", "_pdrop", "drop_path_rate"];
/// Words in the names of factors, of which 1 changes nothing.
const FACTORS: [&str; 5] = ["scale", "scaling", "factor", "multiplier", "divisor"];
/// Words in the names of fields whose texts choose what is computed.
const CHOICES: [&str; 16] = [
    "act",
    "attention",
    "attn",
    "embed",
    "ffn",
    "func",
    "gat",
    "layer",
    "mask",
    "method",
    "mlp",
    "norm",
    "position",
    "rope",
    "router",
    "scor",
];
/// The kind of layers that see all tokens, in lists of the kinds of layers.
const FULL: &str = "full_attention";
/// Words in the names of switches that may be on without the field.
const ON: [&str; 8] = ["causal", "embed", "mask", "norm", "position", "rope", "rotary", "scal"];

impl<'a> UnknownFields<'a> {
    /// Creates what is found of a file that calls the fields of a `config.json` as `name_of` says.
    pub(crate) fn of(name_of: &'a dyn Fn(&str) -> String) -> Self {
        Self { name_of, refused: Vec::new(), notes: Vec::new() }
    }

    /// Returns what the file calls a field of a `config.json`.
    pub(super) fn name_of(&self, field: &str) -> String {
        (self.name_of)(field)
    }

    /// Decides about a field by its name in the file and its value.
    pub(crate) fn judge(&mut self, name: &str, value: &Value) {
        let rate = value.as_f64().filter(|_| DROPOUTS.iter().any(|end| name.ends_with(end)));
        if rate.is_some_and(|rate| rate != 0.0) {
            self.notes.push(format!("{name} {value} is for training, and nothing here drops out"));
        } else if rate.is_none() && !name.starts_with(MARKER) {
            match is_off(name, value) {
                true => {
                    self.notes.push(format!("{name} {} is not known, and changes nothing", shortened(value)));
                }
                false => self.refuse(name, format!("{name} ({}) is not known", shortened(value))),
            }
        }
    }

    /// Refuses a field for a reason.
    pub(super) fn refuse(&mut self, name: &str, reason: String) {
        self.refused.push((name.to_owned(), reason));
    }

    /// Returns the notes, if all fields that are refused are `ignored`.
    ///
    /// # Errors
    /// Names each field that is refused, and each ignored one that is not; `whose` they are.
    pub(super) fn settle(mut self, ignored: &[String], whose: &str) -> Result<Vec<String>> {
        let is_refused = |name: &&String| self.refused.iter().any(|(refused, _)| refused == *name);
        let idle: Vec<&str> = ignored.iter().filter(|name| !is_refused(name)).map(String::as_str).collect();
        ensure!(idle.is_empty(), "--ignore-field {}: nothing refuses it, leave it out", idle.join(", "));
        let (given, rest): (Vec<_>, Vec<_>) =
            self.refused.into_iter().partition(|(name, _)| ignored.contains(name));
        let reasons: Vec<&str> = rest.iter().map(|(_, reason)| reason.as_str()).collect();
        let flags: Vec<String> = rest.iter().map(|(name, _)| format!("--ignore-field {name}")).collect();
        ensure!(
            rest.is_empty(),
            "{}; for {whose} the model may compute something else than this program. Who knows better gives {}",
            reasons.join("; "),
            flags.join(" ")
        );
        self.notes.extend(given.into_iter().map(|(_, reason)| format!("{reason}, and is ignored")));
        Ok(self.notes)
    }
}

/// Whether a value says of all layers that they see all tokens, as without it.
pub(super) fn is_full_attention(value: &Value) -> bool {
    value.as_array().is_some_and(|items| !items.is_empty() && items.iter().all(|item| item == FULL))
}

/// Whether a field names a token, or says how exactly something is computed that is computed in 32 bits here.
fn is_aside(name: &str, value: &Value) -> bool {
    let is_token = |value: &Value| value.is_i64();
    let are_tokens = |value: &Value| value.as_array().is_some_and(|items| items.iter().all(is_token));
    let names_token = name.ends_with("_id") && is_token(value);
    let names_tokens = name.ends_with("token_ids") && are_tokens(value);
    names_token || names_tokens || (name.ends_with("_in_fp32") && value.is_boolean())
}

/// Whether a value switches something off, is a name, or says that all layers are of the common kind.
fn is_off(name: &str, value: &Value) -> bool {
    match value {
        _ if is_aside(name, value) => true,
        Value::Null => true,
        Value::Bool(on) => !on && !ON.iter().any(|word| name.contains(word)),
        Value::Number(number) if number.as_f64() == Some(1.0) => {
            FACTORS.iter().any(|word| name.contains(word))
        }
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || !CHOICES.iter().any(|word| name.contains(word)),
        Value::Array(items) => items.is_empty() || is_full_attention(value),
        Value::Object(fields) => fields.is_empty(),
    }
}
