//! Chat templates against transformers', and conversations against runs with the whole text as the prompt.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use candle_core::DType;
use candle_lm::chat::{ChatMessage, ChatTemplate};
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Stop, Task, generate};
use candle_lm::sample::Sampling;
use candle_lm::tokens::encode_rendered;
use candle_lm::{random_model, stops, tokens};
use examples::cli::Output as Destination;
use jiff::civil::date;
use lm::chat::args::ChatArgs;
use lm::chat::converse::{Conversation, Event, Turn, converse};
use lm::chat::transcript::Transcript;
use serde::Deserialize;
use serde_json::{Value, json};
use test_utils::on_ranks;

#[derive(Deserialize)]
pub(crate) struct Facts {
    families: Vec<Family>,
    pub(crate) smollm2: Vec<Case>,
}

#[derive(Deserialize)]
struct Family {
    name: String,
    template: String,
    tokens: BTreeMap<String, Option<String>>,
    cases: Vec<Case>,
}

/// What transformers makes of a conversation.
#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) messages: Vec<ChatMessage>,
    pub(crate) text: Option<String>,
    #[serde(default)]
    pub(crate) ids: Vec<u32>,
    error: Option<String>,
}

pub(crate) fn facts() -> Facts {
    serde_json::from_str(include_str!("chat.json")).unwrap()
}

/// A template that only appends, and one that changes earlier replies.
pub(crate) const APPENDS: &str = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const CHANGES: &str = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ 'x' if m.role == 'assistant' else m.content }}<|end|>{% endfor %}<|assistant|>";

const SPECIAL: [&str; 5] = ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"];

/// The tokens of the model: visible letters, a space, a line break, and special tokens.
fn random_vocabulary() -> usize {
    ('!'..='~').count() + 2 + SPECIAL.len()
}

/// Writes a random model with a tokenizer of ASCII letters and special tokens, and this template.
pub(crate) fn write(folder: &Path, template: &str) {
    let mut tokenizer: Value =
        serde_json::from_str(&tokens::of_bytes().unwrap().to_string(false).unwrap()).unwrap();
    let letters = ('!'..='~').chain(['Ġ', 'Ċ']).map(String::from);
    let vocab: serde_json::Map<String, Value> =
        letters.zip(0..).map(|(letter, id)| (letter, json!(id))).collect();
    let count = vocab.len();
    tokenizer["model"]["vocab"] = Value::Object(vocab);
    let added = SPECIAL.iter().zip(count..).map(|(text, id)| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    tokenizer["added_tokens"] = added.collect();
    let config = Config {
        hidden_size: 32,
        intermediate_size: 44,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        vocab_size: count + SPECIAL.len(),
        max_position_embeddings: 512,
        ..random_model::config()
    };
    random_model::write(folder, &config, 7, DType::F32).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let fields = json!({"bos_token": "<s>", "eos_token": {"content": "<|end|>"}, "chat_template": template});
    fs::write(folder.join("tokenizer_config.json"), fields.to_string()).unwrap();
}

fn task(prompt: Vec<u32>) -> Task {
    Task {
        prompt,
        most: 12,
        sampling: Sampling { temperature: 1.0, top_p: 0.9, seed: 5, ..Sampling::default() },
        cache_tokens: None,
        held: ModelOptions::of(DType::F32),
    }
}

const MESSAGES: [&str; 3] = ["Hi there", "And then?", "So"];

/// The turns of a conversation, which are the same on all ranks.
fn talk(folder: &Path, world: usize, stages: usize, args: ChatArgs) -> Result<Vec<Turn>, String> {
    let folder = folder.to_owned();
    let failed = Arc::new(Mutex::new(None));
    let seen = failed.clone();
    let turns = on_ranks(world, "talk", move |ctx| -> anyhow::Result<Vec<Turn>> {
        let mut files = Files::open(&folder)?;
        let (tokenizer, template) = (files.tokenizer()?, files.chat_template()?);
        files.ends.extend(template.end_of_turn(&tokenizer));
        let (task, mut messages) = (task(Vec::new()), MESSAGES.iter());
        let conversation = Conversation {
            files: &files,
            tokenizer: &tokenizer,
            template: &template,
            task: &task,
            args: &args,
            stops: &[],
        };
        let listen = || Ok(messages.next().map(|&message| message.to_owned()));
        let mut turns = Vec::new();
        let talked = converse(ctx, stages, conversation, listen, |event| {
            if let Event::Replied(turn) = event {
                turns.push(turn.clone());
            }
        });
        if let Err(error) = talked {
            *seen.lock().unwrap() = Some(format!("{error:#}"));
        }
        Ok(turns)
    });
    if let Some(error) = failed.lock().unwrap().take() {
        return Err(error);
    }
    let told = |turns: &[Turn]| {
        turns.iter().map(|turn| (turn.tokens.clone(), turn.cached_tokens)).collect::<Vec<_>>()
    };
    assert!(turns.iter().all(|other| told(other) == told(&turns[0])));
    Ok(turns[0].clone())
}

#[test]
fn templates_render_as_in_transformers() {
    let now = date(2026, 3, 7).at(9, 5, 0, 0);
    for Family { name, template, tokens, cases } in facts().families {
        let template = ChatTemplate::new(&template, &name, tokens).unwrap();
        for Case { messages, text, error, .. } in cases {
            match (template.render(&messages, now), text, error) {
                (Ok(got), Some(want), None) => assert_eq!(got, want, "{name}"),
                (Err(got), None, Some(want)) => {
                    let got = format!("{got:#}");
                    assert!(got.contains(&want) && got.contains(&name), "{got}, want {want}");
                }
                (got, want, error) => panic!("{name}: {got:?}, want {want:?} or {error:?}"),
            }
        }
    }
}

#[test]
fn the_arguments_of_tojson_are_in_the_order_of_transformers() {
    let source = "{{ 'é' | tojson(true) }}{{ [1] | tojson(false, 1) }}";
    let template = ChatTemplate::new(source, "a file", BTreeMap::new()).unwrap();
    let script = template.render(&[ChatMessage::new("user", "Hi")], date(2026, 3, 7).at(9, 5, 0, 0)).unwrap();
    assert_eq!(&*script, "\"\\u00e9\"[\n 1\n]");
}

#[test]
fn a_template_that_cannot_be_used_is_refused_by_its_file() {
    let now = date(2026, 3, 7).at(9, 5, 0, 0);
    let messages = [ChatMessage::new("user", "Hi")];
    let of = |source: &str| ChatTemplate::new(source, "a file", BTreeMap::new());
    for wrong in ["{% for m in messages %}", "{{ messages", "{% unknown %}", "{% generation %}", "{%}"] {
        let said = format!("{:#}", of(wrong).unwrap_err());
        assert!(said.contains("a file") && said.contains("chat:1"), "{wrong}: {said}");
    }
    let endless = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}";
    for (fails, want) in [
        ("{{ messages[0].content.encode('x') }}", "encode"),
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ strftime_now('%Q!') }}", "%Q"),
        ("{{ messages | tojson(separators=1) }}", "separators"),
        (endless, "fuel"),
    ] {
        let said = format!("{:#}", of(fails).unwrap().render(&messages, now).unwrap_err());
        assert!(said.contains("a file") && said.contains(want), "{fails}: {said}");
    }

    let folder = tempfile::tempdir().unwrap();
    let said = || format!("{:#}", examples_template(folder.path()).unwrap_err());
    write(folder.path(), APPENDS);
    assert!(examples_template(folder.path()).is_ok());
    let set =
        |fields: Value| fs::write(folder.path().join("tokenizer_config.json"), fields.to_string()).unwrap();
    set(json!({"chat_template": null}));
    assert!(said().contains("has no chat template"), "{}", said());
    set(json!({"chat_template": [{"name": "tool_use", "template": "x"}]}));
    assert!(said().contains("\"default\""), "{}", said());
    set(
        json!({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]}),
    );
    assert_eq!(examples_template(folder.path()).unwrap().render(&messages, now).unwrap(), "y");
    // The file wins.
    fs::write(folder.path().join("chat_template.jinja"), "z").unwrap();
    assert_eq!(examples_template(folder.path()).unwrap().render(&messages, now).unwrap(), "z");
    set(json!({"bos_token": 7}));
    assert!(said().contains("bos_token is 7"), "{}", said());
}

fn examples_template(folder: &Path) -> anyhow::Result<ChatTemplate> {
    Files::open(folder)?.chat_template()
}

#[test]
fn replies_of_a_conversation_equal_runs_with_its_whole_text_on_every_mesh() {
    for (template, appends) in [(APPENDS, true), (CHANGES, false)] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), template);
        let args = ChatArgs { chat: true, system: Some("Be brief".into()), ..ChatArgs::default() };
        let turns = talk(folder.path(), 1, 1, args.clone()).unwrap();
        assert_eq!(turns.len(), MESSAGES.len());
        let first_special = (random_vocabulary() - SPECIAL.len()) as u32;
        for (turn, next) in turns.iter().zip(&turns[1..]) {
            // Special tokens do not become text, so the text of such a reply is another sequence of tokens.
            let is_text = turn.tokens.iter().all(|&token| token < first_special);
            let read = turn.prompt_tokens + turn.tokens.len() - usize::from(turn.stop == Stop::Length);
            assert_eq!(next.cached_tokens, if appends && is_text { read } else { 0 }, "{turns:?}");
        }
        assert_eq!(turns.iter().any(|turn| turn.cached_tokens > 0), appends, "{turns:?}");
        // The same replies without a cache.
        let mut files = Files::open(folder.path()).unwrap();
        let (tokenizer, template) = (files.tokenizer().unwrap(), files.chat_template().unwrap());
        files.ends.extend(template.end_of_turn(&tokenizer));
        let files = Arc::new(files);
        let mut messages = vec![ChatMessage::new("system", "Be brief")];
        for turn in &turns {
            messages.push(ChatMessage::new("user", &turn.message));
            let text = template.render(&messages, date(2026, 3, 7).at(9, 5, 0, 0)).unwrap();
            let (files, task) = (files.clone(), task(encode_rendered(&tokenizer, &text).unwrap()));
            let written =
                on_ranks(1, "alone", move |ctx| generate(ctx, 1, &files, &task, |_| Ok(true))).remove(0);
            assert_eq!(written.tokens, turn.tokens);
            messages.push(ChatMessage::new("assistant", &turn.text));
        }
        for (world, stages) in [(2, 1), (3, 1), (2, 2), (4, 2)] {
            let other = talk(folder.path(), world, stages, args.clone()).unwrap();
            let told = |turns: &[Turn]| {
                turns.iter().map(|turn| (turn.tokens.clone(), turn.cached_tokens)).collect::<Vec<_>>()
            };
            assert_eq!(told(&other), told(&turns), "{stages} stages on {world} ranks");
        }
        let small = talk(folder.path(), 2, 1, ChatArgs { context: Some(30), ..args }).unwrap_err();
        assert!(small.contains("room for 30") && small.contains("--context"), "{small}");
    }
}

#[test]
fn tokens_that_the_model_names_in_a_reply_are_tokens_of_the_next_prompt() {
    let folder = tempfile::tempdir().unwrap();
    // A third of the letters are tags such as `<think>`, and the template knows them.
    let tag = |id: usize| format!("<t{id}>");
    let known: String = (0..30).map(tag).collect();
    write(folder.path(), &format!("{APPENDS}{{# {known} #}}"));
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    vocab.retain(|_, id| id.as_u64() >= Some(30));
    vocab.extend((0..30).map(|id| (tag(id), json!(id))));
    tokenizer["added_tokens"].as_array_mut().unwrap().extend((0..30).map(|id| {
        json!({"id": id, "content": tag(id), "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false})
    }));
    fs::write(&path, tokenizer.to_string()).unwrap();
    let turns = talk(folder.path(), 1, 1, ChatArgs { chat: true, ..ChatArgs::default() }).unwrap();
    let first_special = (random_vocabulary() - SPECIAL.len()) as u32;
    let mut tags = 0;
    for (turn, next) in turns.iter().zip(&turns[1..]) {
        if turn.tokens.iter().all(|&token| token < first_special) {
            tags += turn.tokens.iter().filter(|&&token| token < 30).count();
            let read = turn.prompt_tokens + turn.tokens.len() - usize::from(turn.stop == Stop::Length);
            assert_eq!(next.cached_tokens, read, "{turns:?}");
        }
    }
    assert!(tags > 0, "{turns:?}");
    // In a message of a user they are letters.
    let (files, mut message) = (Files::open(folder.path()).unwrap(), ChatMessage::new("assistant", "a<t7>b"));
    let encoded = |message: &ChatMessage| {
        let script = files
            .chat_template()
            .unwrap()
            .render(std::slice::from_ref(message), date(2026, 3, 7).at(9, 5, 0, 0))
            .unwrap();
        encode_rendered(&files.tokenizer().unwrap(), &script)
    };
    assert!(!encoded(&message).is_ok_and(|ids| ids.contains(&7)));
    message.named.push(1..5);
    assert!(encoded(&message).unwrap().contains(&7));
}

#[test]
fn a_special_token_in_stop_never_matched() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), APPENDS);
    let tokenizer = tokens::read(folder.path()).unwrap();
    assert_eq!(tokenizer.get_vocab_size(true), random_vocabulary());
    let id = tokenizer.token_to_id("<|end|>").unwrap();
    let split = |values: &[&str]| {
        let values: Vec<String> = values.iter().map(|&value| value.into()).collect();
        stops::split(&values, &tokenizer).map_err(|error| error.to_string())
    };
    assert_eq!(split(&["<|end|>", "\nUser"]), Ok((vec!["\nUser".into()], vec![id])));
    let said = split(&["x<|end|>"]).unwrap_err();
    assert!(said.contains("<|end|>") && said.contains("alone"), "{said}");
    // The model ends its text with the token that it draws first.
    let run = |flags: &[&str]| lm(folder.path(), flags, "");
    let json = |output: Output| -> Value {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let flags = ["--prompt", "Hi", "--max-tokens", "40", "--temperature", "3", "--top-p", "1", "--json", "-"];
    let all = json(run(&flags));
    let drawn: Vec<u32> = serde_json::from_value(all["tokens"].clone()).unwrap();
    let first = drawn
        .iter()
        .position(|&token| tokenizer.id_to_token(token).is_some_and(|text| SPECIAL.contains(&text.as_str())));
    let first = first.expect("one special token of 40 of 101");
    let stop = tokenizer.id_to_token(drawn[first]).unwrap();
    let stopped = json(run(&[&flags[..], &["--stop", &stop]].concat()));
    assert_eq!(stopped["tokens"], json!(drawn[..first]), "{stop}");
}

fn lm(folder: &Path, flags: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lm"));
    command.args(["generate", "--model", folder.to_str().unwrap()]).args(flags);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn the_program_talks_line_by_line_and_answers_one_prompt() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), APPENDS);
    let flags = ["--chat", "--tp", "2", "--temperature", "0", "--max-tokens", "6", "--json", "-"];
    let run = |more: &[&str], input: &str| lm(folder.path(), &[&flags[..], more].concat(), input);
    let json = |output: Output| -> Value {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let turns = json(run(&[], "Hi\n\r\n\nHo\n"));
    assert_eq!(
        (&turns[0]["message"], &turns[1]["message"], &turns[2]),
        (&json!("Hi"), &json!("Ho"), &Value::Null)
    );
    assert!(turns[1]["cached_tokens"].as_u64() > Some(0), "{turns}");
    let one = json(run(&["--prompt", "Hi"], ""));
    assert_eq!((&one["tokens"], &one["text"]), (&turns[0]["tokens"], &turns[0]["text"]));
    assert_ne!(json(run(&["--prompt", "Hi", "--system", "No"], ""))["logits_top"], one["logits_top"]);
    for mesh in [["--pp", "2"], ["--cp", "2"]] {
        let made = json(run(&mesh, "Hi\nHo"));
        assert_eq!(made[1]["tokens"], turns[1]["tokens"], "{mesh:?}");
        assert_eq!(made[1]["cached_tokens"], turns[1]["cached_tokens"], "{mesh:?}");
    }

    let refused = |flags: &[&str], want: &str| {
        let output = lm(folder.path(), flags, "Hi");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(want) && said.lines().count() == 1, "{said}");
    };
    refused(&["--system", "x"], "--chat");
    refused(&["--chat", "--prompt", "x", "--context", "9"], "--context");
    refused(&["--chat", "--context", "6"], "room for 6");
    fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
    refused(&["--chat", "--tp", "2"], "has no chat template");
}

#[test]
fn turns_before_an_error_are_kept_with_it() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), APPENDS);
    let input = format!("Hi\nHo\n{}\nHe\n", "x".repeat(400));
    let file = folder.path().join("turns.json");
    let flags = ["--chat", "--temperature", "0", "--max-tokens", "4", "--context", "200", "--json"];
    for more in [&["--tp", "2"][..], &["--pp", "2"], &["--tp", "1"]] {
        for path in [file.to_str().unwrap(), "-"] {
            let output = lm(folder.path(), &[&flags[..], &[path], more].concat(), &input);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains("room for 200"), "{said}");
            let written = if path == "-" { output.stdout } else { fs::read(&file).unwrap() };
            let turns: Vec<Value> = serde_json::from_slice(&written).unwrap();
            let messages: Vec<&Value> = turns.iter().map(|turn| &turn["message"]).collect();
            assert_eq!(messages, [&json!("Hi"), &json!("Ho"), &Value::Null], "{more:?} {path}");
            assert!(turns[2]["error"].as_str().unwrap().contains("room for 200"), "{}", turns[2]);
            fs::remove_file(&file).ok();
        }
    }
}

#[test]
fn a_file_keeps_its_turns_until_all_of_them_are_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let (inner, away) = (folder.path().join("inner"), folder.path().join("away"));
    fs::create_dir(&inner).unwrap();
    let (file, partial) = (inner.join("turns.json"), inner.join("turns.json.partial"));
    let link = folder.path().join("link.json");
    std::os::unix::fs::symlink("inner/turns.json", &link).unwrap();
    fs::write(&file, "[]").unwrap();
    // Of somebody else.
    fs::write(&partial, "not yours").unwrap();
    let transcript = Transcript::new(Destination::new(Some(&link)));
    let turn = |message: &str| Turn {
        message: message.into(),
        text: "Ho".into(),
        tokens: vec![1],
        prompt_tokens: 1,
        cached_tokens: 0,
        stop: Stop::Length,
        seconds_to_first_token: 0.0,
        tokens_per_s: 0.0,
    };
    let messages = || -> Vec<Value> {
        let turns: Vec<Value> = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        turns.into_iter().map(|turn| turn["message"].clone()).collect()
    };
    transcript.add(&turn("one"));
    assert_eq!(messages(), ["one"]);
    // Nothing can be written beside the file for a while.
    fs::rename(&inner, &away).unwrap();
    transcript.add(&turn("two"));
    assert!(transcript.finish(None).is_err());
    fs::rename(&away, &inner).unwrap();
    assert_eq!(messages(), ["one"]);
    transcript.finish(None).unwrap();
    assert_eq!(messages(), ["one", "two"]);
    assert!(link.is_symlink());
    assert_eq!(fs::read_to_string(&partial).unwrap(), "not yours");
    assert_eq!(fs::read_dir(&inner).unwrap().count(), 2, "nothing half written is left");
}

/// The templates of the facts.
pub(crate) fn templates() -> Vec<String> {
    facts().families.into_iter().map(|family| family.template).collect()
}

/// The names and templates of the facts.
pub(crate) fn families() -> Vec<(String, String)> {
    facts().families.into_iter().map(|family| (family.name, family.template)).collect()
}

/// What jinja2 makes of templates.
#[derive(Deserialize)]
struct Meanings {
    messages: Vec<ChatMessage>,
    facts: Vec<Meaning>,
}

#[derive(Deserialize)]
struct Meaning {
    template: String,
    text: Option<String>,
    error: Option<String>,
}

/// A million tokens or so.
#[test]
fn long_conversations_are_not_too_much_work() {
    let now = date(2026, 3, 7).at(9, 5, 0, 0);
    for Family { name, template, tokens, .. } in facts().families {
        let template = ChatTemplate::new(&template, &name, tokens).unwrap();
        for (count, length) in [(4001, 1000), (401, 10_000), (1, 4_000_000), (20_001, 10)] {
            let messages: Vec<ChatMessage> = (0..count)
                .map(|place| ChatMessage::new(["user", "assistant"][place % 2], "word ".repeat(length / 5)))
                .collect();
            let text = template.render(&messages, now).unwrap();
            assert!(text.len() > length, "{name}");
        }
    }
}

/// Facts of `benchmarks/jinja_facts.py`.
#[test]
fn templates_mean_what_they_mean_to_jinja2() {
    let Meanings { messages, facts } = serde_json::from_str(include_str!("jinja.json")).unwrap();
    let mut wrong = Vec::new();
    for Meaning { template, text, error } in &facts {
        let made = ChatTemplate::new(template, "a file", BTreeMap::new());
        let made = made.and_then(|made| made.render(&messages, date(2026, 3, 7).at(9, 5, 0, 0)));
        match (made, text) {
            (Ok(got), Some(want)) if got == *want => {}
            (Err(_), None) => {}
            (got, want) => wrong.push(format!("{template}\n  got  {got:?}\n  want {want:?} {error:?}")),
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), facts.len(), wrong.join("\n"));
}
