//! Tokenizers of GGUF files against transformers'; facts of `benchmarks/tokenizer_facts.py`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_lm::chat::{self, ChatMessage, ChatTemplate};
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::Task;
use candle_lm::sample::Sampling;
use candle_lm::{random_model, tokens};
use serde::Deserialize;
use serde_json::json;

#[derive(Clone, Deserialize)]
pub(crate) struct Fact {
    architecture: String,
    model: String,
    pre: Option<String>,
    adds: Option<bool>,
    tokens: Vec<String>,
    scores: Vec<f32>,
    kinds: Vec<i32>,
    merges: Option<Vec<String>>,
    ids: BTreeMap<String, u32>,
    encodings: Vec<(String, Vec<u32>)>,
    decodings: Vec<String>,
}

pub(crate) fn facts() -> Vec<Fact> {
    serde_json::from_str(include_str!("tokenizers.json")).unwrap()
}

pub(crate) fn write(path: &Path, fact: &Fact, more: &[(&str, Value)]) {
    let texts = |texts: &[String]| Value::Array(texts.iter().cloned().map(Value::String).collect());
    let mut metadata = vec![
        ("general.architecture".to_owned(), Value::String(fact.architecture.clone())),
        ("tokenizer.ggml.model".into(), Value::String(fact.model.clone())),
        ("tokenizer.ggml.tokens".into(), texts(&fact.tokens)),
        ("tokenizer.ggml.scores".into(), Value::Array(fact.scores.iter().copied().map(Value::F32).collect())),
        (
            "tokenizer.ggml.token_type".into(),
            Value::Array(fact.kinds.iter().copied().map(Value::I32).collect()),
        ),
    ];
    metadata.extend(fact.pre.clone().map(|pre| ("tokenizer.ggml.pre".into(), Value::String(pre))));
    metadata.extend(fact.adds.map(|adds| ("tokenizer.ggml.add_bos_token".into(), Value::Bool(adds))));
    metadata.extend(fact.merges.as_ref().map(|merges| ("tokenizer.ggml.merges".into(), texts(merges))));
    metadata.extend(fact.ids.iter().map(|(name, &id)| (format!("tokenizer.ggml.{name}"), Value::U32(id))));
    for (name, value) in more {
        metadata.retain(|(known, _)| known != name);
        metadata.push(((*name).into(), value.clone()));
    }
    let tensor =
        QTensor::quantize(&Tensor::zeros((2, 4), DType::F32, &Device::Cpu).unwrap(), GgmlDType::F32).unwrap();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(name, value)| (name.as_str(), value)).collect();
    gguf_file::write(&mut fs::File::create(path).unwrap(), &metadata, &[("a", &tensor)]).unwrap();
}

#[test]
fn tokens_of_gguf_files_are_those_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for fact in facts() {
        write(&path, &fact, &[]);
        let tokenizer = tokens::read(&path).unwrap();
        let what = format!("{} {} {:?}", fact.architecture, fact.model, fact.pre);
        for ((text, ids), decoded) in fact.encodings.iter().zip(&fact.decodings) {
            assert_eq!(&tokens::encode(&tokenizer, text).unwrap(), ids, "{what}: {text:?}");
            assert_eq!(&tokenizer.decode(ids, true).unwrap(), decoded, "{what}: {text:?}");
        }
    }
}

#[test]
fn a_file_may_say_that_texts_do_not_begin_with_a_space() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let facts = facts();
    for fact in [&facts[0], &facts[3]] {
        write(&path, fact, &[("tokenizer.ggml.add_space_prefix", Value::Bool(false))]);
        let tokenizer = tokens::read(&path).unwrap();
        let ids = tokens::encode(&tokenizer, "the cat").unwrap();
        assert!(!tokenizer.id_to_token(ids[1]).unwrap().starts_with('▁'), "{ids:?}");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "the cat");
        let spaced = tokens::encode(&tokenizer, " the cat").unwrap();
        assert_eq!(tokenizer.decode(&spaced, true).unwrap(), " the cat");
    }
}

#[test]
fn metadata_that_contradicts_itself_is_refused_by_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let fact = facts().remove(0);
    let text = |text: &str| Value::String(text.into());
    let cases = [
        ("tokenizer.ggml.model", text("t5"), "\"t5\""),
        ("tokenizer.ggml.scores", Value::Array(vec![Value::F32(0.0)]), "tokenizer.ggml.scores has 1"),
        ("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1)]), "tokenizer.ggml.token_type has 1"),
        ("tokenizer.ggml.bos_token_id", Value::U32(1 << 20), "bos_token_id 1048576 is no token"),
        ("tokenizer.ggml.tokens", Value::Array(vec![Value::U8(1)]), "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.merges", Value::Array(vec![text("ab")]), "tokenizer.ggml.merges has \"ab\""),
    ];
    for (key, value, want) in cases {
        write(&path, &fact, &[(key, value)]);
        let said = format!("{:#}", tokens::read(&path).unwrap_err());
        assert!(said.contains(want) && said.contains("model.gguf"), "{said}, want {want}");
    }
}

#[test]
fn a_tokenizer_with_special_tokens_above_the_vocabulary_is_no_error_until_a_prompt_has_one() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config {
        hidden_size: 32,
        intermediate_size: 44,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..random_model::config()
    };
    random_model::write(folder.path(), &config, 7, DType::F32).unwrap();
    let path = folder.path().join("tokenizer.json");
    let with = |special: bool| {
        let mut tokenizer: serde_json::Value =
            serde_json::from_str(&tokens::of_bytes().unwrap().to_string(false).unwrap()).unwrap();
        tokenizer["added_tokens"] = json!([{"id": 256, "content": "<image>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": special}]);
        fs::write(&path, tokenizer.to_string()).unwrap();
        Files::open(folder.path()).unwrap().tokenizer()
    };
    let tokenizer = with(true).unwrap();
    let check = |text: &str| {
        let task = Task {
            prompt: tokens::encode(&tokenizer, text).unwrap(),
            most: 1,
            sampling: Sampling::default(),
            cache_tokens: None,
            held: ModelOptions::of(DType::F32),
        };
        task.check(&config)
    };
    check("an image").unwrap();
    let said = check("an <image>").unwrap_err().to_string();
    assert!(said.contains("256") && said.contains("do not fit together"), "{said}");
    assert!(with(false).unwrap_err().to_string().contains("do not fit together"));
}

/// Writes a `tokenizer.json` of words that a pattern cuts.
fn write_words(folder: &Path, pattern: &str, words: &[&str]) {
    let vocab: BTreeMap<&str, usize> = words.iter().copied().zip(0..).collect();
    let json = json!({"version": "1.0", "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}});
    fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
}

/// As the tokenizers of transformers do, whose patterns are those of Oniguruma.
#[test]
fn patterns_mean_what_they_mean_to_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for (pattern, text, pieces) in [
        (r"\p{N}{1,3}+", "12345678", &["12345678"][..]),
        (r"^b", "a\nb", &["a\n", "b"]),
        (r"a$", "a\nb", &["a", "\nb"]),
        (r"(?i:'s|'t)", "it'S", &["it", "'S"]),
    ] {
        write_words(folder.path(), pattern, &[&["[UNK]"], pieces].concat());
        let ids = tokens::encode(&tokens::read(folder.path()).unwrap(), text).unwrap();
        assert_eq!(ids, (1..=pieces.len() as u32).collect::<Vec<_>>(), "{pattern}");
    }
}

#[test]
fn a_pattern_that_takes_too_many_steps_on_a_text_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    write_words(folder.path(), r"(?:a|a|aa)+[b-d]{2}", &["[UNK]"]);
    let tokenizer = tokens::read(folder.path()).unwrap();
    let said = tokens::encode(&tokenizer, &format!("{}!bb", "a".repeat(200))).unwrap_err().to_string();
    assert!(said.contains("the tokenizer cannot cut the text"), "{said}");
    assert_eq!(tokens::encode(&tokenizer, "b").unwrap(), [0]);
}

#[test]
fn phi_3_takes_the_white_space_behind_its_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let fact = facts().into_iter().find(|fact| fact.architecture == "phi3").unwrap();
    write(&path, &fact, &[]);
    let tokenizer = tokens::read(&path).unwrap();
    let ids = |text: &str| tokens::encode(&tokenizer, text).unwrap();
    assert_eq!(ids("<tool>\n  the</tool> \n"), ids("<tool>the</tool>"));
    // The beginning of a text does not.
    assert_ne!(ids("<s> the"), ids("<s>the"));
    // Nor does white space come back where a message has the letters of a control token.
    let script = |template: &str| {
        let template = ChatTemplate::new(template, "a file", BTreeMap::new()).unwrap();
        let script = template.render(&[ChatMessage::new("user", "the <tool> cat")], chat::now()).unwrap();
        tokens::encode_rendered(&tokenizer, &script).unwrap()
    };
    assert_eq!(script("<tool>\n {{ messages[0].content }}"), script("<tool>{{ messages[0].content }}"));
}

#[test]
fn a_file_may_say_that_texts_end_with_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let fact = &facts()[0];
    write(&path, fact, &[("tokenizer.ggml.add_eos_token", Value::Bool(true))]);
    let ids = tokens::encode(&tokens::read(&path).unwrap(), "the cat").unwrap();
    let around = [ids[0], ids[ids.len() - 1]];
    assert_eq!(around, [fact.ids["bos_token_id"], fact.ids["eos_token_id"]]);
    // A text that is continued does not.
    let tokenizer = tokens::read(&path).unwrap();
    assert_eq!(tokens::encode_prompt(&tokenizer, "the cat").unwrap(), ids[..ids.len() - 1]);
    write(&path, fact, &[]);
    let tokenizer = tokens::read(&path).unwrap();
    assert_eq!(tokens::encode_prompt(&tokenizer, "the cat").unwrap(), ids[..ids.len() - 1]);
}

/// What transformers makes of a folder.
#[derive(Deserialize)]
struct Folder {
    name: String,
    files: BTreeMap<String, serde_json::Value>,
    named: BTreeMap<String, String>,
    encodings: Vec<(String, Vec<u32>)>,
}

/// Facts of `benchmarks/special_token_facts.py`.
#[derive(Deserialize)]
struct Folders {
    tokenizer: serde_json::Value,
    facts: Vec<Folder>,
}

#[test]
fn tokens_that_small_files_declare_are_found_as_in_transformers() {
    let Folders { tokenizer, facts } = serde_json::from_str(include_str!("special_tokens.json")).unwrap();
    let folder = |files: &BTreeMap<String, serde_json::Value>| {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        files
            .iter()
            .for_each(|(name, fields)| fs::write(folder.path().join(name), fields.to_string()).unwrap());
        folder
    };
    for Folder { name, files, named, encodings } in &facts {
        let folder = folder(files);
        let tokenizer = tokens::read(folder.path()).unwrap();
        for (text, want) in encodings {
            assert_eq!(&tokens::encode(&tokenizer, text).unwrap(), want, "{name}: {text:?}");
        }
        for (token, want) in named.iter().filter(|(token, _)| *token != "image_token") {
            let template = format!("{{{{ {token} }}}}");
            fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
            assert_eq!(rendered(folder.path()).unwrap(), *want, "{name}: {token}");
        }
    }
    // A token that has two numbers, and one that a template writes and no file has.
    let config = |fields: serde_json::Value| BTreeMap::from([("tokenizer_config.json".to_owned(), fields)]);
    let twice = folder(&config(json!({"added_tokens_decoder": {"300": {"content": "<tool>"}}})));
    assert_eq!(tokens::read(twice.path()).unwrap().token_to_id("<tool>"), Some(258));
    let other = folder(&config(json!({"added_tokens_decoder": {"300": {"content": "<new>"}}})));
    let said = format!("{:#}", tokens::read(other.path()).unwrap_err());
    assert!(said.contains("\"<new>\" is the token 300") && said.contains("259"), "{said}");
    for (fields, template, want) in [
        (json!({}), "{{ bos_token }}x", Err("writes bos_token")),
        (json!({}), "{{ bos_token if bos_token is defined }}x", Ok("x")),
        (json!({"bos_token": null}), "{{ bos_token }}x", Ok("x")),
        (json!({"bos_token": "<s>"}), "{{ bos_token }}x", Ok("<s>x")),
        (json!({"bos_token": 7}), "x", Err("bos_token is 7")),
    ] {
        let folder = folder(&config(fields));
        fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        match (rendered(folder.path()), want) {
            (Ok(text), Ok(want)) => assert_eq!(text, want, "{template}"),
            (Err(said), Err(want)) => assert!(said.contains(want), "{said}"),
            (got, want) => panic!("{template}: {got:?}, want {want:?}"),
        }
    }
}

/// What the template of a folder writes of no messages.
fn rendered(folder: &Path) -> Result<String, String> {
    let config = Config { hidden_size: 8, num_attention_heads: 2, vocab_size: 300, ..random_model::config() };
    let config = Config { num_key_value_heads: Some(1), head_dim: None, ..config };
    random_model::write(folder, &config, 7, DType::F32).map_err(|error| format!("{error:#}"))?;
    let script = Files::open(folder).and_then(|files| files.chat_template()?.render(&[], chat::now()));
    script.map(|script| script.to_string()).map_err(|error| format!("{error:#}"))
}
