//! Files of records: which tokens count, and what is wrong with a line.

use std::fs;

use candle_lm::chat::ChatMessage;
use candle_lm::files::Files;
use candle_lm::train::data::{Record, RecordEncoder, TrainingData};
use lm::args::Args;
use serde_json::json;

use crate::lm::chat::{self, APPENDS};
use crate::lm_train::support::{Place, config};

/// A conversation with two replies.
fn conversation() -> Record {
    let message = |role: &str, content: &str| ChatMessage::new(role, content);
    Record::Chat(vec![
        message("user", "Hi"),
        message("assistant", "Hello."),
        message("user", "So? <|end|>"),
        message("assistant", "So."),
    ])
}

/// The text of a record by a model with this template, with brackets around what counts.
fn marked(template: &str, record: &Record) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    chat::write(folder.path(), template);
    let files = Files::open(folder.path()).unwrap();
    let mut documents =
        RecordEncoder::new(&files).unwrap().encode(record).map_err(|error| format!("{error:#}"))?;
    let document = documents.remove(0);
    let (tokenizer, mut made) = (files.tokenizer().unwrap(), String::new());
    for part in document.tokens.iter().zip(&document.counts).collect::<Vec<_>>().chunk_by(|a, b| a.1 == b.1) {
        let ids: Vec<u32> = part.iter().map(|(token, _)| **token).collect();
        let text = tokenizer.decode(&ids, false).unwrap();
        made += &if *part[0].1 { format!("[{text}]") } else { text };
    }
    Ok(made)
}

#[test]
fn texts_and_completions_count_with_the_token_that_ends_them() {
    let text = |text: &str| marked(APPENDS, &Record::Text(text.into())).unwrap();
    assert_eq!(text("Once upon"), "[Once upon<|end|>]");
    let completed = |prompt: &str, completion: &str| {
        let (prompt, completion) = (prompt.into(), completion.into());
        marked(APPENDS, &Record::Completion { prompt, completion }).unwrap()
    };
    assert_eq!(completed("Once", " upon"), "Once[ upon<|end|>]");
    assert_eq!(completed("", "upon"), "[upon<|end|>]");
    assert_eq!(completed("Once", ""), "Once[<|end|>]");
}

#[test]
fn replies_count_by_the_text_that_they_add() {
    // What looks like a control token in a message is letters.
    let want =
        "<s><|user|>Hi<|end|><|assistant|>[Hello.<|end|>]<|user|>So? <|end|><|end|><|assistant|>[So.<|end|>]";
    assert_eq!(marked(APPENDS, &conversation()).unwrap(), want);
    // Without the beginning of a reply, the role counts too.
    let plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}";
    assert_eq!(
        marked(plain, &conversation()).unwrap(),
        "<|user|>Hi[<|assistant|>Hello.]<|user|>So? <|end|>[<|assistant|>So.]"
    );
}

#[test]
fn replies_count_by_the_marks_of_the_template() {
    let template = "{{ bos_token }}{%- for m in messages -%}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ '<|end|>' }}{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{%- endfor -%}";
    let want =
        "<s><|user|>Hi<|end|><|assistant|>[Hello.<|end|>]<|user|>So? <|end|><|end|><|assistant|>[So.<|end|>]";
    assert_eq!(marked(template, &conversation()).unwrap(), want);
    // Marks also tell what a template writes otherwise when others follow.
    let changes = template.replace("{{ m.content }}{{ '<|end|>' }}", "{{ m.content if loop.last else '-' }}");
    assert_eq!(
        marked(&changes, &conversation()).unwrap(),
        "<s><|user|>Hi<|end|><|assistant|>[-]<|user|>So? <|end|><|end|><|assistant|>[So.]"
    );
    // With signs that take line breaks away.
    let spaced = template
        .replace("{% generation %}", "\n  {%- generation -%}\n ")
        .replace("{% endgeneration %}", "\n{%- endgeneration %}");
    assert_eq!(marked(&spaced, &conversation()).unwrap(), want);
    let hidden = "{% macro reply(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{% for m in messages %}{{ reply(m) }}{% endfor %}";
    assert!(marked(hidden, &conversation()).unwrap_err().contains("inside of a macro"));
}

#[test]
fn a_template_that_rewrites_what_was_said_is_refused() {
    let last = "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == 'user' else 'x' }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    let said = marked(last, &conversation()).unwrap_err();
    assert!(
        said.contains("tokenizer_config.json")
            && said.contains("up to message 2")
            && said.contains("{% generation %}"),
        "{said}"
    );
    // One reply at the end is as it was said.
    let Record::Chat(messages) = conversation() else { unreachable!() };
    let short = Record::Chat(messages[..2].to_vec());
    assert_eq!(marked(last, &short).unwrap(), "<|user|>Hi<|end|><|assistant|>[Hello.<|end|>]");
    let begins = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>Well, {% endif %}";
    let said = marked(begins, &conversation()).unwrap_err();
    assert!(said.contains("does not begin message 2 as it begins a reply"), "{said}");
}

#[test]
fn each_kind_of_bad_line_is_named_and_skipped_if_that_is_asked_for() {
    let place = Place::new(&config(4, 2));
    let good = json!({"text": "A good line."}).to_string();
    let message = |fields: serde_json::Value| json!({"messages": [fields]}).to_string();
    let cases: [(Vec<u8>, &str); 23] = [
        (b"{\"text\": ".to_vec(), "it is no JSON ("),
        (b"[]".to_vec(), "it is no JSON object"),
        (b"{\"text\": \"\xff\"}".to_vec(), "it is no UTF-8"),
        (b"{}".to_vec(), "its fields are []"),
        (
            br#"{"txt": "a"}"#.to_vec(),
            "its fields are [txt], and a record has text, or prompt and completion, or messages",
        ),
        (br#"{"text": 5}"#.to_vec(), "its text is a number, and no text"),
        (br#"{"text": "abc", "source": "web"}"#.to_vec(), r#"it has the field "source" too"#),
        (br#"{"text": "abc", "messages": []}"#.to_vec(), r#"it has the field "messages" too"#),
        (br#"{"prompt": "abc"}"#.to_vec(), "it has no completion"),
        (br#"{"completion": "abc"}"#.to_vec(), "it has no prompt"),
        (br#"{"prompt": "abc", "completion": null}"#.to_vec(), "its completion is null, and no text"),
        (br#"{"messages": "abc"}"#.to_vec(), r#"its "messages" is a text, and no list of messages"#),
        (br#"{"messages": []}"#.to_vec(), r#"its "messages" is empty"#),
        (br#"{"prompt": "a", "chosen": "b"}"#.to_vec(), "it has no rejected"),
        (br#"{"prompt": "a", "chosen": "b", "rejected": "b"}"#.to_vec(), "its chosen is its rejected"),
        (
            br#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#.to_vec(),
            "it is a preference, which --dpo learns",
        ),
        (br#"{"messages": ["abc"]}"#.to_vec(), "message 1 is a text, and no object"),
        (message(json!({"role": "robot", "content": "a"})).into(), r#"message 1 has the role "robot""#),
        (message(json!({"role": "user", "content": ["a"]})).into(), "of message 1: its content is a list"),
        (
            message(json!({"role": "user", "content": "a", "name": "b"})).into(),
            r#"message 1 has the field "name""#,
        ),
        (
            message(json!({"role": "user", "content": "a"})).into(),
            "it is a conversation, and the model has no chat template",
        ),
        (
            json!({"text": "x".repeat(30)}).to_string().into(),
            "it has 30 tokens, and --seq-len 24 takes 25; --too-long",
        ),
        (json!({"text": "x"}).to_string().into(), "none of its tokens is to be predicted"),
    ];
    let bad = place.path("bad.jsonl");
    for (line, want) in &cases {
        // Some programs put a mark before the first line.
        let lines = [b"\xef\xbb\xbf", good.as_bytes(), b"\n\n", line, b"\r\n", good.as_bytes()].concat();
        fs::write(&bad, &lines).unwrap();
        let flags = "--data @records.jsonl --data @bad.jsonl --seq-len 24";
        let said = format!("{:#}", place.open(flags).unwrap_err());
        let place_of = format!("--data {}, line 3: {want}", bad.display());
        assert!(said.contains(&place_of) && said.contains("--skip-bad-lines"), "{said}: {place_of}");
        let job = place.open(&format!("{flags} --skip-bad-lines")).unwrap();
        let TrainingData::Documents(set) = &job.text else { panic!("records") };
        assert_eq!(set.documents(), 42);
        let note = job.notes.iter().find(|note| note.contains("1 bad line of --data skipped"));
        assert!(note.is_some_and(|note| note.contains(&format!("line 3: {want}"))), "{:?}", job.notes);
    }
}

#[test]
fn records_that_are_too_long_are_skipped_cut_or_split() {
    let place = Place::new(&config(4, 2));
    let long: String = ('a'..='z').chain('A'..='Z').collect();
    let records = [
        json!({"text": long}),
        json!({"prompt": long, "completion": "after"}),
        json!({"prompt": "Once", "completion": long}),
        json!({"text": "short"}),
    ];
    let records: String = records.iter().map(|record| record.to_string() + "\n").collect();
    fs::write(place.path("long.jsonl"), records).unwrap();
    let open = |flags: &str| place.open(&format!("--data @long.jsonl --seq-len 10 {flags}"));
    let counts = |flags: &str| {
        let job = open(flags).unwrap();
        let TrainingData::Documents(set) = &job.text else { panic!("records") };
        ([set.documents(), set.tokens(), set.counted()], job.notes.clone())
    };
    let (skipped, notes) = counts("--too-long skip");
    assert_eq!(skipped, [1, 5, 4]);
    assert_eq!(notes, ["3 too long lines of --data skipped"]);
    // Nothing of the second record's completion is left.
    let said = format!("{:#}", open("--too-long cut").unwrap_err());
    assert!(said.contains("line 2: none of its first 11 tokens is to be predicted"), "{said}");
    let (cut, notes) = counts("--too-long cut --skip-bad-lines");
    assert_eq!(cut, [3, 11 + 11 + 5, 10 + 7 + 4]);
    assert!(
        notes[0].starts_with("1 bad line of --data skipped") && notes[1] == "3 too long lines of --data cut",
        "{notes:?}"
    );
    // 52 letters make six parts, each with the last letter of the part before.
    let (split, notes) = counts("--too-long split --skip-bad-lines");
    assert_eq!(split, [6 + 2, 57 + 11 + 5, 51 + 7 + 4]);
    assert!(notes.contains(&"1 too long line of --data split".to_owned()), "{notes:?}");
    fs::write(place.path("none.jsonl"), "{}\n\n").unwrap();
    let said = format!("{:#}", place.open("--data @none.jsonl --skip-bad-lines").unwrap_err());
    assert!(said.contains("no token to learn") && said.contains("1 bad line"), "{said}");
    let said = format!("{:#}", place.open("--data @nowhere").unwrap_err());
    assert!(said.contains("nowhere cannot be read") && said.contains("JSON lines"), "{said}");
}

#[test]
fn one_of_a_text_and_records_is_trained_on() {
    use clap::Parser;

    let said = |flags: &str| {
        let line = format!("lm {flags}");
        let parsed = Args::try_parse_from(line.split(' ')).map_err(|error| error.to_string());
        parsed.and_then(|args| args.validate().map_err(|error| error.to_string())).unwrap_err()
    };
    assert!(said("--train a --data b").contains("cannot be used with"));
    assert!(said("train").contains("--data FILE"));
    assert!(said("score --data b --text c").contains("--data"));
    assert!(said("--data b --prompt c").contains("--prompt"));
    assert!(said("--skip-bad-lines").contains("--data"));
    assert!(said("train --data b --too-long shorten").contains("shorten"));
    assert!(said("train --data b --log b").contains("--log b is also --data"));
}
