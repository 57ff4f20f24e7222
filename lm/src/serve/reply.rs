//! What a text of a model is: thoughts, the answer, and calls of functions.

use std::sync::Arc;

use serde_json::Value;

use super::calls::{self, CallFormat, CallRead, FunctionCall};

/// One part more of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReplyDelta {
    /// Of the answer.
    Text(String),
    /// Of the thoughts before it.
    Thought(String),
    /// A call, whole or its beginning.
    Call(FunctionCall),
    /// More of the arguments of the last call.
    Arguments(String),
    /// A call that the client does not want. Its tokens are no text.
    ExtraCall,
}

/// How a reply is to be read.
#[derive(Clone, Debug, Default)]
pub(super) struct ReplyForm {
    /// Whether thoughts are apart from the answer.
    pub(super) thinks: bool,
    /// Whether the prompt has begun them.
    pub(super) begins_thinking: bool,
    pub(super) calls: CallForm,
    /// Whether there is one call at most.
    pub(super) calls_once: bool,
    /// The functions of the request.
    pub(super) tools: Arc<Vec<Value>>,
}

/// Where a reply may have calls.
#[derive(Clone, Debug, Default)]
pub(super) enum CallForm {
    /// Nowhere.
    #[default]
    None,
    /// Where the model puts them.
    Free(CallFormat),
    /// The reply is a list of calls, as a grammar says.
    List,
    /// The reply is the arguments of this function.
    Arguments(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyState {
    /// Nothing came but spaces.
    Start,
    Thoughts,
    /// The answer; spaces at its beginning are left out.
    Text,
    /// What may be a call.
    Call,
}

/// Reads a reply piece by piece. The pieces may be cut anywhere.
#[derive(Debug)]
pub(super) struct ReplyReader {
    form: ReplyForm,
    state: ReplyState,
    waiting: String,
    /// Whether a call may have become whole with the last piece: a long one is not parsed again for each token.
    may_close: bool,
    /// Whether the answer has begun.
    has_text: bool,
    calls: usize,
}

/// The most bytes of what may be a call that are parsed with each piece.
const SHORT: usize = 512;
const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";

impl ReplyReader {
    pub(super) fn new(form: ReplyForm) -> Self {
        let state = if form.begins_thinking { ReplyState::Thoughts } else { ReplyState::Start };
        Self { form, state, waiting: String::new(), may_close: false, has_text: false, calls: 0 }
    }

    /// Whether what comes next is hidden from log-probabilities, as thoughts are.
    pub(super) fn is_thinking(&self) -> bool {
        self.state == ReplyState::Thoughts
    }

    /// How many calls there were.
    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    /// Reads more text, the last one if `is_whole`, and appends what is clear now.
    pub(super) fn read(&mut self, more: &str, is_whole: bool, deltas: &mut Vec<ReplyDelta>) {
        self.waiting.push_str(more);
        self.may_close = is_whole || self.waiting.len() <= SHORT || more.contains(['}', ']', '>']);
        match self.form.calls.clone() {
            CallForm::Arguments(name) => self.read_arguments(name, is_whole, deltas),
            CallForm::List => self.read_list(is_whole, deltas),
            CallForm::None => while self.step(None, is_whole, deltas) {},
            CallForm::Free(format) => while self.step(Some(format), is_whole, deltas) {},
        }
    }

    fn read_arguments(&mut self, name: String, is_whole: bool, deltas: &mut Vec<ReplyDelta>) {
        if self.calls == 0 && (is_whole || !self.waiting.is_empty()) {
            self.calls = 1;
            deltas.push(ReplyDelta::Call(FunctionCall { name, arguments: String::new() }));
        }
        if !self.waiting.is_empty() {
            deltas.push(ReplyDelta::Arguments(std::mem::take(&mut self.waiting)));
        }
    }

    fn read_list(&mut self, is_whole: bool, deltas: &mut Vec<ReplyDelta>) {
        loop {
            let rest =
                self.waiting.trim_start_matches(|c: char| c.is_whitespace() || matches!(c, '[' | ',' | ']'));
            if rest.len() < self.waiting.len() {
                self.waiting = rest.to_owned();
            }
            if !self.may_close {
                return;
            }
            match calls::value(&self.waiting) {
                Ok(Some((value, bytes))) => {
                    self.waiting.drain(..bytes);
                    self.push_calls(calls::call(&value), deltas);
                }
                _ if is_whole && !self.waiting.is_empty() => {
                    // It was cut.
                    deltas.push(ReplyDelta::Text(std::mem::take(&mut self.waiting)));
                }
                _ => return,
            }
        }
    }

    fn push_calls(&mut self, calls: impl IntoIterator<Item = FunctionCall>, deltas: &mut Vec<ReplyDelta>) {
        for call in calls {
            if self.calls == 0 || !self.form.calls_once {
                self.calls += 1;
                deltas.push(ReplyDelta::Call(call));
            } else {
                deltas.push(ReplyDelta::ExtraCall);
            }
        }
    }

    /// Does one thing with what waits, and returns whether there may be more to do.
    fn step(&mut self, format: Option<CallFormat>, is_whole: bool, deltas: &mut Vec<ReplyDelta>) -> bool {
        match self.state {
            ReplyState::Start => self.start(format, is_whole),
            ReplyState::Thoughts => self.think(is_whole, deltas),
            ReplyState::Text => self.answer(format, is_whole, deltas),
            ReplyState::Call => self.call(format, is_whole, deltas),
        }
    }

    fn start(&mut self, format: Option<CallFormat>, is_whole: bool) -> bool {
        let has_calls = self.calls > 0;
        let text = self.waiting.trim_start_matches(|c: char| c.is_whitespace() || has_calls && c == ';');
        if self.form.thinks && text.starts_with(THINK) {
            let begun = self.waiting.len() - text.len() + THINK.len();
            self.waiting.drain(..begun);
            self.state = ReplyState::Thoughts;
            return true;
        }
        let may_think = self.form.thinks && THINK.starts_with(text);
        if may_think && !is_whole {
            return false;
        }
        if text.is_empty() && format.is_some() && !is_whole {
            return false;
        }
        let is_bare = format.is_some_and(|format| format.begins_bare(text));
        self.state = if is_bare { ReplyState::Call } else { ReplyState::Text };
        if is_bare {
            self.waiting = text.to_owned();
        }
        true
    }

    fn think(&mut self, is_whole: bool, deltas: &mut Vec<ReplyDelta>) -> bool {
        let (clear, found) = clear_of(&self.waiting, THOUGHT, is_whole);
        let mut thought: String = self.waiting.drain(..clear).collect();
        if found {
            self.waiting.drain(..THOUGHT.len());
            self.waiting = self.waiting.trim_start().to_owned();
            self.state = ReplyState::Text;
        }
        // A line break in front of the thoughts belongs to the tag.
        if let Some(rest) = thought.strip_prefix('\n').filter(|_| !self.has_text) {
            thought = rest.to_owned();
        }
        self.has_text |= !thought.is_empty();
        if found {
            self.has_text = false;
        }
        if !thought.is_empty() {
            deltas.push(ReplyDelta::Thought(thought));
        }
        found
    }

    fn answer(&mut self, format: Option<CallFormat>, is_whole: bool, deltas: &mut Vec<ReplyDelta>) -> bool {
        let (clear, found) = match format {
            Some(format) => clear_of(&self.waiting, format.mark(), is_whole),
            None => (self.waiting.len(), false),
        };
        // Spaces around calls, and those behind thoughts, are no answer.
        let trims = self.form.thinks || format.is_some();
        let text = &self.waiting[..clear];
        if trims && !self.has_text && text.trim().is_empty() {
            if found {
                self.waiting.drain(..clear);
                self.state = ReplyState::Call;
            } else if is_whole {
                self.waiting.clear();
            }
            return found;
        }
        let mut text: String = self.waiting.drain(..clear).collect();
        if trims && !self.has_text && self.form.thinks {
            text = text.trim_start().to_owned();
        }
        self.has_text |= !text.is_empty();
        if !text.is_empty() {
            deltas.push(ReplyDelta::Text(text));
        }
        if found {
            self.state = ReplyState::Call;
        }
        found
    }

    fn call(&mut self, format: Option<CallFormat>, is_whole: bool, deltas: &mut Vec<ReplyDelta>) -> bool {
        let Some(format) = format else {
            self.state = ReplyState::Text;
            return true;
        };
        if !self.may_close {
            return false;
        }
        match format.read(&self.waiting, is_whole, &self.form.tools) {
            CallRead::Calls(calls, bytes) => {
                self.waiting.drain(..bytes);
                self.push_calls(calls, deltas);
                self.has_text = false;
                let rest = self.waiting.trim_start_matches(|c: char| c.is_whitespace() || c == ';');
                if format == CallFormat::Bare && rest.starts_with('{') {
                    self.waiting = rest.to_owned();
                } else if format == CallFormat::Bare && rest.is_empty() && !is_whole {
                    // Another one may follow.
                    self.state = ReplyState::Start;
                    self.waiting.clear();
                    return false;
                } else {
                    self.state = ReplyState::Text;
                }
                true
            }
            CallRead::Part if !is_whole => false,
            CallRead::Part | CallRead::NoCall => {
                // It was cut, or is none: the client gets the letters.
                let mark = format.mark();
                let end =
                    if self.waiting.starts_with(mark) && !is_whole { mark.len() } else { self.waiting.len() };
                let text: String = self.waiting.drain(..end).collect();
                self.has_text = true;
                self.state = ReplyState::Text;
                if !text.is_empty() {
                    deltas.push(ReplyDelta::Text(text));
                }
                !self.waiting.is_empty()
            }
        }
    }
}

/// How many bytes of a text are surely before `mark`, and whether the mark is behind them.
fn clear_of(text: &str, mark: &str, is_whole: bool) -> (usize, bool) {
    if let Some(at) = text.find(mark) {
        return (at, true);
    }
    if is_whole {
        return (text.len(), false);
    }
    let mut starts = text.char_indices().map(|(at, _)| at);
    (starts.find(|&at| mark.starts_with(&text[at..])).unwrap_or(text.len()), false)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use serde_json::json;

    use super::*;

    /// What becomes of a reply in pieces of so many characters.
    fn read(form: &ReplyForm, reply: &str, piece: usize) -> (String, String, Vec<(String, String)>) {
        let mut reader = ReplyReader::new(form.clone());
        let mut deltas = Vec::new();
        let letters: Vec<char> = reply.chars().collect();
        for piece in letters.chunks(piece) {
            reader.read(&piece.iter().collect::<String>(), false, &mut deltas);
        }
        reader.read("", true, &mut deltas);
        let (mut text, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
        for delta in deltas {
            match delta {
                ReplyDelta::Text(more) => text.push_str(&more),
                ReplyDelta::Thought(more) => thought.push_str(&more),
                ReplyDelta::Call(call) => calls.push((call.name, call.arguments)),
                ReplyDelta::Arguments(more) => calls.last_mut().unwrap().1.push_str(&more),
                ReplyDelta::ExtraCall => assert!(form.calls_once && !calls.is_empty()),
            }
        }
        assert_eq!(reader.calls(), calls.len());
        (text, thought, calls)
    }

    fn calls(named: &[(&str, &str)]) -> Vec<(String, String)> {
        named.iter().map(|&(name, arguments)| (name.to_owned(), arguments.to_owned())).collect()
    }

    #[track_caller]
    fn check(form: &ReplyForm, reply: &str, text: &str, thought: &str, wanted: &[(&str, &str)]) {
        for piece in [1, 2, 3, 7, 1000] {
            let found = read(form, reply, piece);
            assert_eq!(found, (text.to_owned(), thought.to_owned(), calls(wanted)), "in pieces of {piece}");
        }
    }

    fn free(format: CallFormat) -> ReplyForm {
        let f = json!({"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}});
        let tools = vec![f, json!({"type": "function", "function": {"name": "g"}})];
        ReplyForm {
            thinks: true,
            calls: CallForm::Free(format),
            tools: Arc::new(tools),
            ..ReplyForm::default()
        }
    }

    #[test]
    fn tagged_calls_are_read_in_any_pieces() {
        let form = free(CallFormat::Tagged);
        let one = r#"<tool_call>
{"name": "f", "arguments": {"s": "</tool_call> {", "n": 2}}
</tool_call>"#;
        let arguments = r#"{"s":"</tool_call> {","n":2}"#;
        check(&form, one, "", "", &[("f", arguments)]);
        check(&form, &format!("\n{one}\n{one}\n"), "", "", &[("f", arguments), ("f", arguments)]);
        check(&form, &format!("<think>\nhm</think>\n\nOne: {one}"), "One: ", "hm", &[("f", arguments)]);
        let xml = "<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>";
        check(&form, xml, "", "", &[("f", r#"{"s":"12","n":12}"#)]);
        let once = ReplyForm { calls_once: true, ..form.clone() };
        check(&once, &format!("{one}{one}"), "", "", &[("f", arguments)]);
        for none in
            ["<tool_call>nonsense", "a <tool_call> b", "<tool_call>{\"a\": 1}</tool_call>", "x < y <tool_"]
        {
            check(&form, none, none, "", &[]);
        }
    }

    #[test]
    fn a_call_that_is_cut_anywhere_is_text_or_a_call_and_never_lost() {
        let form = free(CallFormat::Tagged);
        let reply = r#"<tool_call>{"name": "f", "arguments": {"s": "é"}}</tool_call>"#;
        for (end, _) in reply.char_indices().skip(1) {
            let (text, _, calls) = read(&form, &reply[..end], 1);
            assert!(
                text == reply[..end] && calls.is_empty() || text.is_empty() && calls.len() == 1,
                "{end}: {text}"
            );
        }
    }

    #[test]
    fn calls_of_llama_and_mistral_are_read() {
        let bare = free(CallFormat::Bare);
        check(&bare, r#"{"name": "f", "parameters": {"n": 1}}"#, "", "", &[("f", r#"{"n":1}"#)]);
        check(
            &bare,
            r#"<|python_tag|>{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}"#,
            "",
            "",
            &[("f", r#"{"n":1}"#), ("g", "{}")],
        );
        check(&bare, r#"{"answer": 42}"#, r#"{"answer": 42}"#, "", &[]);
        check(&bare, "{ is a brace", "{ is a brace", "", &[]);
        let listed = free(CallFormat::Listed);
        check(
            &listed,
            r#"[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]"#,
            "",
            "",
            &[("f", r#"{"n":1}"#), ("g", "{}")],
        );
        check(
            &listed,
            r#"[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g{}"#,
            "",
            "",
            &[("f", r#"{"n":1}"#), ("g", "{}")],
        );
        check(&listed, "I cannot.", "I cannot.", "", &[]);
    }

    #[test]
    fn answers_that_look_like_calls_of_unknown_functions_are_text() {
        for (format, text) in [
            (CallFormat::Bare, r#"{"name": "Zoe", "age": 3}"#),
            (CallFormat::Bare, r#"{"name": "Zoe", "parameters": {}}"#),
            (CallFormat::Tagged, r#"<tool_call>{"name": "Zoe", "arguments": {}}</tool_call>"#),
            (CallFormat::Tagged, "<tool_call><function=Zoe></function></tool_call>"),
            (CallFormat::Listed, r#"[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "Zoe"}]"#),
            (CallFormat::Listed, r#"[TOOL_CALLS]Zoe[ARGS]{"n": 1}"#),
        ] {
            check(&free(format), text, text, "", &[]);
        }
    }

    #[test]
    fn thoughts_are_apart_from_the_answer() {
        let form = ReplyForm { thinks: true, ..ReplyForm::default() };
        check(&form, "<think>\na < b\n</think>\n\nYes.\n", "Yes.\n", "a < b\n", &[]);
        check(&form, "No <think>", "No <think>", "", &[]);
        check(&form, "<think>cut", "", "cut", &[]);
        let begun = ReplyForm { begins_thinking: true, ..form };
        check(&begun, "so</think>Yes", "Yes", "so", &[]);
        check(&ReplyForm::default(), " <think>a</think> ", " <think>a</think> ", "", &[]);
    }

    #[test]
    fn forced_calls_are_what_the_grammar_lets_through() {
        let list = ReplyForm { calls: CallForm::List, ..ReplyForm::default() };
        check(
            &list,
            r#"[{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]"#,
            "",
            "",
            &[("f", r#"{"n":1}"#), ("g", "{}")],
        );
        check(&list, r#"[{"name": "f", "argu"#, r#"{"name": "f", "argu"#, "", &[]);
        let named = ReplyForm { calls: CallForm::Arguments("f".into()), ..ReplyForm::default() };
        check(&named, r#"{"n": 1}"#, "", "", &[("f", r#"{"n": 1}"#)]);
        check(&named, r#"{"n": "#, "", "", &[("f", r#"{"n": "#)]);
    }
}
