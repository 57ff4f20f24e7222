//! Where the chat template of a model is.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::Value as Stored;
use candle_shard::regular;
use serde_json::Value;

use super::ChatTemplate;
use crate::special_tokens::{self, CONFIG, SpecialTokens};

const JINJA: &str = "chat_template.jinja";
const JSON: &str = "chat_template.json";
/// Beside the first one, that of conversations with tools.
pub(crate) const TOOL_USE: &str = "additional_chat_templates/tool_use.jinja";
/// The keys of the template in GGUF files, and of another one for conversations with tools.
pub(crate) const TEMPLATE: &str = "tokenizer.chat_template";
pub(crate) const FOR_TOOLS: &str = "tokenizer.chat_template.tool_use";

/// The special tokens of GGUF files: the key of the number.
const IDS: [(&str, &str); 4] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
];

/// Returns the template of the model in a folder: `chat_template.jinja`, perhaps with another one for tools, else that of
/// `tokenizer_config.json`, else that of `chat_template.json`, which some models for images have alone; `None` without any.
///
/// # Errors
/// If it is not a template; the file is named.
pub(crate) fn in_folder(folder: &Path) -> Result<Option<ChatTemplate>> {
    let (config, jinja) = (folder.join(CONFIG), folder.join(JINJA));
    let fields = special_tokens::fields(folder, CONFIG)?;
    let named = SpecialTokens::of(folder, &fields)?.named;
    let tokens = named.into_iter().map(|(name, token)| (name.to_owned(), token)).collect();
    match regular::read_text(&jinja, regular::CONFIG) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        source => {
            let origin = jinja.display().to_string();
            let template = ChatTemplate::new(&source.with_context(|| origin.clone())?, &origin, tokens)?;
            let path = folder.join(TOOL_USE);
            let for_tools = match regular::read_text(&path, regular::CONFIG) {
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                source => Some(source.with_context(|| path.display().to_string())?),
            };
            return template.with_tool_use(for_tools, path.display().to_string()).map(Some);
        }
    }
    let (origin, fields) = match fields.get("chat_template") {
        None | Some(Value::Null) => (folder.join(JSON), special_tokens::fields(folder, JSON)?),
        Some(_) => (config, fields),
    };
    let mut for_tools = None;
    let source = match fields.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(source)) => source.clone(),
        // Several templates by name.
        Some(Value::Array(named)) => {
            let of = |name: &str| {
                let one = named.iter().find(|one| one.get("name").is_some_and(|own| own == name))?;
                Some(one.get("template")?.as_str()?.to_owned())
            };
            for_tools = of("tool_use");
            of("default")
                .with_context(|| format!("{}: chat_template has no template \"default\"", origin.display()))?
        }
        Some(_) => bail!("{}: chat_template is no text", origin.display()),
    };
    let tool_use = format!("{}, \"tool_use\"", origin.display());
    ChatTemplate::new(&source, &origin.display().to_string(), tokens)?
        .with_tool_use(for_tools, tool_use)
        .map(Some)
}

/// Returns the template in the metadata of the GGUF file at `path`; `None` without one.
///
/// # Errors
/// If it is not a template.
pub(crate) fn in_metadata(metadata: &BTreeMap<String, Stored>, path: &Path) -> Result<Option<ChatTemplate>> {
    let text = |key: &str| {
        let source = metadata.get(key).map(|source| source.to_string().cloned());
        source.transpose().with_context(|| format!("{}: {key}", path.display()))
    };
    let Some(source) = text(TEMPLATE)? else { return Ok(None) };
    let tokens = tokens(metadata, path)?;
    let tool_use = format!("{}, {FOR_TOOLS}", path.display());
    ChatTemplate::new(&source, &path.display().to_string(), tokens)?
        .with_tool_use(text(FOR_TOOLS)?, tool_use)
        .map(Some)
}

/// Returns the special tokens in the metadata of the GGUF file at `path`, by their names.
///
/// # Errors
/// If one is no token.
pub(crate) fn tokens(
    metadata: &BTreeMap<String, Stored>,
    path: &Path,
) -> Result<BTreeMap<String, Option<String>>> {
    let texts = metadata.get("tokenizer.ggml.tokens").and_then(|tokens| tokens.to_vec().ok());
    let mut tokens = BTreeMap::new();
    for (name, key) in IDS {
        let Some(id) = metadata.get(key).and_then(crate::gguf::whole) else { continue };
        let text = texts.and_then(|texts| texts.get(id as usize)?.to_string().ok());
        ensure!(text.is_some(), "{}: {key} {id} is no token", path.display());
        tokens.extend(text.map(|text| (name.to_owned(), Some(text.clone()))));
    }
    Ok(tokens)
}

/// Returns why a model has no template.
pub(crate) fn absent(path: &Path) -> String {
    if path.is_dir() {
        return format!(
            "{} has no chat template ({} does not exist, and tokenizer_config.json has no chat_template): leave out --chat",
            path.display(),
            path.join(JINJA).display()
        );
    }
    format!("{} has no {TEMPLATE}: leave out --chat", path.display())
}
