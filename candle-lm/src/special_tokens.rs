//! Tokens that files beside `tokenizer.json` declare.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use candle_shard::regular;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

/// Tokens with names, such as `bos_token`, and tokens that are found in a text before it is cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpecialTokens {
    /// Those with names. A file may say that a model has none of a name.
    pub(crate) named: BTreeMap<&'static str, Option<String>>,
    /// All that are special, with and without a name.
    special: Vec<String>,
    added: BTreeMap<u32, AddedToken>,
    /// The file that declares them.
    source: &'static str,
}

/// The names.
pub(crate) const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];

/// The lists of special tokens without a name, or with one that a model has alone.
const OTHERS: [&str; 3] =
    ["additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"];

pub(crate) const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";

/// A token as `tokenizer_config.json` describes it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenFields {
    content: String,
    lstrip: bool,
    normalized: Option<bool>,
    rstrip: bool,
    single_word: bool,
    special: bool,
}

impl SpecialTokens {
    /// Reads what the small files in a folder declare, as transformers does: `tokenizer_config.json` if it has the added tokens,
    /// otherwise `special_tokens_map.json` and `added_tokens.json` too.
    ///
    /// # Errors
    /// If a file cannot be read, or declares what is no token; the file is named.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        Self::of(folder, &fields(folder, CONFIG)?)
    }

    /// Reads what [`read`](Self::read) reads, but for `tokenizer_config.json`, whose fields are these.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub(crate) fn of(folder: &Path, config: &Map<String, Value>) -> Result<Self> {
        let (map, ids) = (fields(folder, MAP)?, fields(folder, ADDED)?);
        let described = config.get("added_tokens_decoder").filter(|list| !list.is_null());
        let order = if described.is_some() {
            [(CONFIG, config), (MAP, &map)]
        } else {
            [(MAP, &map), (CONFIG, config)]
        };
        let mut made = Self { source: if described.is_some() { CONFIG } else { ADDED }, ..Self::default() };
        // transformers has no use for the old file where the new one has all.
        let counts = |file: &str| described.is_none() || file == CONFIG;
        for name in NAMES {
            // The first file that has the name decides, also with null.
            let Some((file, token)) =
                order.iter().find_map(|(file, fields)| Some((*file, fields.get(name)?)))
            else {
                continue;
            };
            let wrong = || format!("{}: {name} is {token}", at(folder, file));
            let content = if token.is_null() { None } else { Some(text(token).with_context(wrong)?) };
            made.special.extend(content.clone().filter(|_| counts(file)));
            made.named.insert(name, content);
        }
        for (file, fields) in order.into_iter().filter(|(file, _)| counts(file)) {
            let lists = OTHERS.into_iter().filter_map(|name| fields.get(name)).flat_map(|list| match list {
                Value::Array(items) => items.iter().collect(),
                Value::Object(items) => items.values().collect(),
                _ => Vec::new(),
            });
            for token in lists.filter(|token| !token.is_null()) {
                made.special
                    .push(text(token).with_context(|| format!("{}: {token} is no token", at(folder, file)))?);
            }
        }
        if let Some(described) = described {
            let list: BTreeMap<u32, TokenFields> = Deserialize::deserialize(described)
                .with_context(|| format!("{}: added_tokens_decoder", at(folder, CONFIG)))?;
            made.added = list.into_iter().map(|(id, token)| (id, token.added())).collect();
        } else {
            let list: BTreeMap<String, u32> =
                Deserialize::deserialize(Value::Object(ids)).with_context(|| at(folder, ADDED))?;
            let special = |content: &String| made.is_special(content);
            made.added = list
                .into_iter()
                .map(|(content, id)| (id, AddedToken::from(&content, special(&content))))
                .collect();
        }
        Ok(made)
    }

    fn is_special(&self, content: &str) -> bool {
        self.special.iter().any(|special| special == content)
    }

    /// Adds the tokens to a tokenizer that does not have them, or has them otherwise.
    ///
    /// # Errors
    /// If a new token would have another number than the file says.
    pub(crate) fn add_to(&self, tokenizer: &mut Tokenizer) -> Result<()> {
        let has = tokenizer.get_added_tokens_decoder();
        // What tokenizer.json says wins over the oldest file.
        let wins = |id: &u32| self.source == ADDED && has.contains_key(id);
        let mut adding: Vec<AddedToken> = Vec::new();
        for (_, token) in self.added.iter().filter(|(id, _)| !wins(id)) {
            let special = token.special || self.is_special(&token.content);
            adding.push(token.clone().special(special));
        }
        let is_known = |content: &str| {
            adding.iter().any(|token| token.content == content)
                || has.values().any(|token| token.content == content)
        };
        let others = self.special.iter();
        let others: Vec<AddedToken> = others
            .filter(|content| !is_known(content) && tokenizer.token_to_id(content).is_some())
            .map(|content| AddedToken::from(content, true))
            .collect();
        adding.extend(others);
        adding.retain(|token| !token.content.is_empty() && !has.values().any(|known| known == token));
        let known: BTreeSet<String> = self
            .added
            .values()
            .map(|token| token.content.clone())
            .filter(|content| tokenizer.token_to_id(content).is_some())
            .collect();
        for part in adding.chunk_by(|a, b| a.special == b.special) {
            let part = part.to_vec();
            let added =
                if part[0].special { tokenizer.add_special_tokens(part) } else { tokenizer.add_tokens(part) };
            added.map_err(|error| anyhow!("{}: {error}", self.source))?;
        }
        // What tokenizer.json has keeps its number, as in transformers.
        let is_new = |token: &AddedToken| !token.content.is_empty() && !known.contains(&token.content);
        for (id, token) in self.added.iter().filter(|(id, token)| !wins(id) && is_new(token)) {
            let got = tokenizer.token_to_id(&token.content);
            ensure!(
                got == Some(*id),
                "{:?} is the token {id} in {}, and would be {} behind those of tokenizer.json",
                token.content,
                self.source,
                got.map_or("none".into(), |got| got.to_string())
            );
        }
        Ok(())
    }
}

impl TokenFields {
    fn added(self) -> AddedToken {
        AddedToken::from(self.content, self.special)
            .lstrip(self.lstrip)
            .rstrip(self.rstrip)
            .single_word(self.single_word)
            .normalized(self.normalized.unwrap_or(!self.special))
    }
}

/// The text of a token, which may be described by an object.
fn text(token: &Value) -> Option<String> {
    token.get("content").unwrap_or(token).as_str().map(str::to_owned)
}

fn at(folder: &Path, file: &str) -> String {
    folder.join(file).display().to_string()
}

/// The fields of a file; none if it is not there.
///
/// # Errors
/// If it cannot be read; it is named.
pub(crate) fn fields(folder: &Path, file: &str) -> Result<Map<String, Value>> {
    let read = || -> Result<Map<String, Value>> {
        match regular::read_text(folder.join(file), regular::TOKENIZER) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Map::new()),
            text => Ok(serde_json::from_str(&text?)?),
        }
    };
    read().with_context(|| at(folder, file))
}
