//! The description of all fields, with the numbers of this server.

use serde_json::Value;

/// The description, in which `x-most` stands for a limit that the model or the command line decides.
const DESCRIBED: &str = include_str!("openapi.json");
const LIMIT: &str = "x-most";

/// Describes a server whose model has so many tokens, and whose requests may ask for so many texts.
pub(super) fn described(tokens: usize, texts: usize) -> String {
    // The file is JSON, which a test sees: as it stands, it lacks some limits and is true.
    let Ok(mut whole) = serde_json::from_str(DESCRIBED) else { return DESCRIBED.to_owned() };
    limit(&mut whole, tokens, texts);
    whole.to_string()
}

fn limit(value: &mut Value, tokens: usize, texts: usize) {
    match value {
        Value::Object(fields) => {
            if let Some(kind) = fields.remove(LIMIT) {
                let most = if kind == "token" { tokens.saturating_sub(1) } else { texts };
                let name = if fields.contains_key("items") { "maxItems" } else { "maximum" };
                fields.insert(name.into(), most.into());
            }
            fields.values_mut().for_each(|value| limit(value, tokens, texts));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| limit(value, tokens, texts)),
        _ => {}
    }
}
