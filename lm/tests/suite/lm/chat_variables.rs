//! Variables and tools of chat templates.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_lm::chat::{ChatMessage, ChatTemplate};
use candle_lm::files::Files;
use jiff::civil::date;
use lm::chat::args::ChatArgs;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::lm::chat::write;
use crate::lm::llama;

/// What transformers makes of a conversation with variables.
#[derive(Deserialize)]
struct Varied {
    name: String,
    template: String,
    messages: Vec<ChatMessage>,
    /// As JSON.
    variables: BTreeMap<String, String>,
    text: String,
}

#[test]
fn variables_of_templates_are_those_of_transformers() {
    let cases: Vec<Varied> = serde_json::from_str(include_str!("chat_variables.json")).unwrap();
    let now = date(2026, 3, 7).at(9, 5, 0, 0);
    for Varied { name, template, messages, variables, text } in cases {
        let mut template = ChatTemplate::new(&template, &name, BTreeMap::new()).unwrap();
        for (name, json) in &variables {
            template = template.with_variable(name, json).unwrap();
        }
        assert_eq!(template.render(&messages, now).unwrap(), text, "{name} {variables:?}");
    }
    let template = ChatTemplate::new("{{ messages[0].content }}{{ x }}", "a file", BTreeMap::new()).unwrap();
    assert_eq!(
        template.render(&[ChatMessage::new("user", "Hi")], now).unwrap(),
        "Hi",
        "what nobody sets is nothing"
    );
    let mut template = Some(template);
    let mut refused = |name: &str, json: &str| {
        let kept = template.take().unwrap();
        template =
            Some(ChatTemplate::new("{{ messages[0].content }}{{ x }}", "a file", BTreeMap::new()).unwrap());
        format!("{:#}", kept.with_variable(name, json).unwrap_err())
    };
    assert!(refused("y", "1").contains("a file: it has no variable y"));
    assert!(refused("content", "1").contains("no variable content"), "what is behind a dot is none");
    assert!(refused("messages", "[]").contains("messages is the conversation's"));
    assert!(refused("x", "{").contains("x is no JSON"));
    assert!(refused("x", &"[".repeat(100_000)).contains("x is no JSON"));
    assert!(refused("x", "18446744073709551615").contains("too large"));
}

#[test]
fn thoughts_have_all_names_that_templates_read_them_by() {
    let source =
        "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}";
    let template = ChatTemplate::new(source, "a file", BTreeMap::new()).unwrap();
    let message = |fields: &[(&str, &str)]| {
        let plain = ChatMessage::new("assistant", "Hi");
        fields.iter().fold(plain, |message, (name, json)| message.with_field(name, *json))
    };
    let cases = [
        (message(&[]), "||;"),
        (message(&[("reasoning_content", "\"a\"")]), "a|a|;"),
        (message(&[("thinking", "\"a\"")]), "a|a|;"),
        (message(&[("reasoning", "\"a\"")]), "a|a|a;"),
        (message(&[("reasoning_content", "null"), ("thinking", "\"b\"")]), "b|b|;"),
        (message(&[("reasoning_content", "\"a\""), ("thinking", "\"b\"")]), "b|a|;"),
    ];
    let now = date(2026, 3, 7).at(9, 5, 0, 0);
    for (message, want) in cases {
        assert_eq!(template.render(std::slice::from_ref(&message), now).unwrap(), want, "{message:?}");
    }
}

#[test]
fn thoughts_beside_a_text_and_calls_are_no_error_of_templates_that_refuse_all_three() {
    let source = "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}[{{ m.content or m.thinking }}]{{ m.tool_calls[0].function.name }}{% else %}{{ m.thinking }}{% endif %}{% endfor %}";
    let template = ChatTemplate::new(source, "a file", BTreeMap::new()).unwrap();
    let calls = r#"[{"type": "function", "function": {"name": "look", "arguments": {}}}]"#;
    let message = |text: &str, calls: &str| {
        ChatMessage::new("assistant", text)
            .with_field("reasoning_content", "\"a\"")
            .with_field("tool_calls", calls)
    };
    let now = date(2026, 3, 7).at(9, 5, 0, 0);
    for (message, want) in [
        (message("Hi", calls), "[Hi]look"),
        (message("", calls), "[a]look"),
        (message("Hi", "[]"), "a"),
        (message("Hi", "null"), "a"),
    ] {
        assert_eq!(template.render(std::slice::from_ref(&message), now).unwrap(), want, "{message:?}");
    }
}

#[test]
fn the_command_line_sets_variables_and_tools_of_the_template() {
    let template =
        "{% for tool in tools or [] %}{{ tool.name }};{% endfor %}{{ mood }}|{{ messages[0].content }}";
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), template);
    let tools = folder.path().join("tools.json");
    fs::write(&tools, r#"[{"name": "clock"}, {"name": "map"}]"#).unwrap();
    let files = Files::open(folder.path()).unwrap();
    let with = |chat_arg: &[&str], tools: Option<&Path>| {
        let chat_arg = chat_arg.iter().map(|&given| given.to_owned()).collect();
        ChatArgs { chat: true, chat_arg, tools: tools.map(Path::to_owned), ..ChatArgs::default() }
            .template(&files)
    };
    let rendered = |template: anyhow::Result<Option<ChatTemplate>>| {
        let template = template.unwrap().unwrap();
        template
            .render(&[ChatMessage::new("user", "Hi")], date(2026, 3, 7).at(9, 5, 0, 0))
            .unwrap()
            .to_string()
    };
    assert_eq!(rendered(with(&[], None)), "|Hi");
    assert_eq!(rendered(with(&["mood=good=x"], Some(&tools))), "clock;map;good=x|Hi");
    assert_eq!(rendered(with(&["mood=[1, true]"], None)), "[1, True]|Hi");
    assert!(ChatArgs::default().template(&files).unwrap().is_none());
    let refused = |template: anyhow::Result<Option<ChatTemplate>>| format!("{:#}", template.unwrap_err());
    let said = llama(&["generate", "--chat", "--prompt", "x", "--chat-arg", "mood=False"]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("would be a text: give false"), "{said:?}");
    assert!(refused(with(&["moods=1"], None)).contains("has no variable moods"));
    fs::write(&tools, "{}").unwrap();
    assert!(refused(with(&[], Some(&tools))).contains("no list of functions"));
    assert!(refused(with(&[], Some(&folder.path().join("no")))).contains("--tools"));
    // Some models have another template for tools, in a file of its own.
    let other = folder.path().join("additional_chat_templates");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("tool_use.jinja"), "F{{ tools | length }}").unwrap();
    fs::write(&tools, "[1, 2]").unwrap();
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    assert_eq!(rendered(with(&[], Some(&tools))), "F2");
    assert_eq!(rendered(with(&[], None)), "|Hi");
    // An error names the file that it is in: as that is read, at a variable, and as it runs.
    assert!(refused(with(&["moods=1"], Some(&tools))).contains("tool_use.jinja: it has no variable moods"));
    assert!(refused(with(&["moods=1"], None)).contains("chat_template.jinja: it has no variable moods"));
    fs::write(other.join("tool_use.jinja"), "{{ tools | length }}{{ raise_exception('no map') }}").unwrap();
    let for_tools = with(&[], Some(&tools)).unwrap().unwrap();
    let said =
        for_tools.render(&[ChatMessage::new("user", "Hi")], date(2026, 3, 7).at(9, 5, 0, 0)).unwrap_err();
    assert!(format!("{said:#}").contains("tool_use.jinja fails: "), "{said:#}");
    fs::write(other.join("tool_use.jinja"), "{% for").unwrap();
    assert!(refused(with(&[], None)).contains("tool_use.jinja: "));
    fs::remove_dir_all(other).unwrap();
    // Or beside the first one.
    let named = json!([{"name": "default", "template": template}, {"name": "tool_use", "template": "T{{ tools | length }}"}]);
    let path = folder.path().join("tokenizer_config.json");
    let mut fields: Value =
        fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or(json!({}));
    fields["chat_template"] = named;
    fs::write(&path, fields.to_string()).unwrap();
    fs::remove_file(folder.path().join("chat_template.jinja")).ok();
    fs::write(&tools, "[1, 2, 3]").unwrap();
    assert_eq!(rendered(with(&[], Some(&tools))), "T3");
    assert_eq!(rendered(with(&[], None)), "|Hi");
}
