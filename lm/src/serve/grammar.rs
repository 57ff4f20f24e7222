//! What replies must look like: JSON, of a schema if the client has one.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use anyhow::{Result, anyhow, ensure};
use candle_lm::serve::{TokenConstraint, TokenMask};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::vocabulary::TokenText;

/// The most bytes of a schema, that of all functions together where one must be called. The compiler has limits of its own.
const LARGEST: usize = 128 << 10;
/// The most objects inside of each other in a schema. The compiler calls itself for each.
const DEEPEST: usize = 64;
/// The most bytes of a pattern.
const LONGEST_PATTERN: usize = 2000;
/// The most alternatives of parts that must hold together. The compiler tries each of one part with each of the others.
const MOST_ALTERNATIVES: usize = 1000;
/// The most parts of such a schema with references followed, times its alternatives.
const MOST_PARTS: usize = 200_000;
/// The stack of the compiler.
const STACK: usize = 64 << 20;

/// Makes grammars over the tokens of a model. What they share is made for the first one.
pub(super) struct Grammars {
    words: Vec<Vec<u8>>,
    ends: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl Grammars {
    /// Grammars over tokens that write these texts, of a model with `vocab_size` logits.
    pub(super) fn new(texts: &[TokenText], vocab_size: usize, ends: &BTreeSet<u32>) -> Self {
        let word = |token: &TokenText| {
            let mark = token.is_control.then_some(TokTrie::SPECIAL_TOKEN_MARKER);
            mark.into_iter().chain(token.bytes.iter().copied()).collect()
        };
        let mut words: Vec<Vec<u8>> = texts.iter().take(vocab_size).map(word).collect();
        // Some models have logits without a token.
        words.resize(vocab_size, Vec::new());
        let mut ends: Vec<u32> = ends.iter().copied().filter(|&end| (end as usize) < words.len()).collect();
        for &end in &ends {
            // A token that ends texts is no part of one.
            if let Some(word) = words.get_mut(end as usize).filter(|word| word.first() != Some(&0xFF)) {
                word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
        }
        if ends.is_empty() {
            // One that the model does not have: the text ends where nothing else may come.
            ends.push(words.len() as u32);
            words.push(b"\xFF<the end>".to_vec());
        }
        Self { words, ends, factory: OnceLock::new() }
    }

    fn factory(&self) -> Result<&ParserFactory> {
        let made = self.factory.get_or_init(|| {
            let make = || -> Result<ParserFactory> {
                let info = TokRxInfo::new(self.words.len() as u32, self.ends[0]);
                let trie = TokTrie::from(&info, &self.words).with_eos_tokens(&self.ends);
                let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
                let mut factory = ParserFactory::new_simple(&tokens)?;
                factory.quiet();
                let limits = factory.limits_mut();
                limits.initial_lexer_fuel = 300_000;
                limits.step_lexer_fuel = 200_000;
                limits.step_max_items = 20_000;
                limits.max_lexer_states = 20_000;
                limits.max_grammar_size = 50_000;
                limits.verbose_errors = false;
                Ok(factory)
            };
            guarded(make).map_err(|error| format!("{error:#}"))
        });
        made.as_ref().map_err(|error| anyhow!("{error}"))
    }

    /// Returns what lets only JSON of this schema through.
    ///
    /// # Errors
    /// If the schema is too large or too deep, or has something that grammars cannot say.
    pub(super) fn json(&self, schema: &Value) -> Result<Grammar> {
        check(schema, 0)?;
        let size = schema.to_string().len();
        ensure!(size <= LARGEST, "the schema has {size} bytes, and at most {LARGEST} are read");
        SchemaCost { root: schema, known: HashMap::new() }.of(schema)?;
        let mut schema = schema.clone();
        if let Value::Object(fields) = &mut schema {
            // JSON on one line: models may else write spaces without an end.
            let ours = serde_json::json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
            fields.insert("x-guidance".into(), ours);
        }
        let factory = self.factory()?;
        let compile = || -> Result<Matcher> {
            let parser = factory.create_parser(TopLevelGrammar::from_json_schema(schema))?;
            let matcher = Matcher::new(Ok(parser));
            match matcher.get_error() {
                Some(error) => Err(anyhow!("{error}")),
                None => Ok(matcher),
            }
        };
        let matcher = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || guarded(compile))?;
            thread.join().unwrap_or_else(|_| Err(anyhow!("it cannot be compiled")))
        })?;
        Ok(Grammar { matcher, vocabulary: self.words.len() })
    }
}

/// Runs `f`, and makes an error of a panic of the crate.
fn guarded<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(f))
        .unwrap_or_else(|panic| Err(anyhow!("{}", candle_dist::panic_message(&*panic))))
}

/// Refuses what takes the compiler too long, or too much stack.
fn check(schema: &Value, depth: usize) -> Result<()> {
    ensure!(depth <= DEEPEST, "the schema has more than {DEEPEST} levels");
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(pattern)) = fields.get("pattern") {
                ensure!(pattern.len() <= LONGEST_PATTERN, "a pattern has more than {LONGEST_PATTERN} bytes");
            }
            fields.values().try_for_each(|part| check(part, depth + 1))
        }
        Value::Array(parts) => parts.iter().try_for_each(|part| check(part, depth + 1)),
        _ => Ok(()),
    }
}

/// Refuses schemas whose parts multiply: the compiler makes one schema of all that must hold together, for each choice of alternatives.
struct SchemaCost<'a> {
    root: &'a Value,
    /// Those of parts that are referred to; 1 of each while it is being counted, as in a list of itself.
    known: HashMap<&'a str, (usize, usize)>,
}

impl<'a> SchemaCost<'a> {
    /// Returns the alternatives of a schema and its parts, with references followed.
    fn of(&mut self, schema: &'a Value) -> Result<(usize, usize)> {
        let Value::Object(fields) = schema else { return Ok((1, 1)) };
        // What must hold together: each of these, and all other keywords.
        let mut factors: Vec<(usize, usize)> = Vec::new();
        let mut rest = (1, 1);
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("allOf", Value::Array(all)) => {
                    for part in all {
                        factors.push(self.of(part)?);
                    }
                }
                ("anyOf" | "oneOf", Value::Array(all)) => factors.push(self.sum(all, (0, 1))?),
                ("enum" | "type", Value::Array(all)) => factors.push((all.len(), all.len())),
                ("$ref", Value::String(name)) => factors.push(self.of_reference(name)?),
                ("required", Value::Array(names)) => rest.1 += names.len(),
                ("properties" | "patternProperties" | "dependentSchemas", Value::Object(parts)) => {
                    rest = self.inside(parts.values(), rest)?;
                }
                ("prefixItems" | "items", Value::Array(parts)) => rest = self.inside(parts, rest)?,
                ("$defs" | "definitions" | "const" | "default" | "examples", _) => {}
                (_, part) => rest = self.inside([part], rest)?,
            }
        }
        factors.push(rest);
        let alternatives = factors.iter().fold(1, |all: usize, (own, _)| all.saturating_mul(*own.max(&1)));
        let parts = factors.iter().fold(0, |all: usize, (_, own)| all.saturating_add(*own));
        let together = factors.iter().filter(|&&factor| factor != (1, 1)).count();
        ensure!(
            together < 2 || alternatives <= MOST_ALTERNATIVES,
            "the schema has {alternatives} combinations of alternatives (anyOf, oneOf, enum, type) that must hold together, and at most \
             {MOST_ALTERNATIVES} are compiled: put fewer alternatives beside each other"
        );
        ensure!(
            together < 2 || alternatives.saturating_mul(parts) <= MOST_PARTS,
            "the schema repeats {parts} parts for {alternatives} combinations of alternatives, which is too much: make it simpler"
        );
        Ok((alternatives, parts))
    }

    fn sum(&mut self, all: &'a [Value], none: (usize, usize)) -> Result<(usize, usize)> {
        all.iter().try_fold(none, |(alternatives, parts), part| {
            let own = self.of(part)?;
            Ok((alternatives.saturating_add(own.0), parts.saturating_add(own.1)))
        })
    }

    /// Adds what values inside of an object or a list have: theirs multiply where two such objects must hold together.
    fn inside(
        &mut self,
        all: impl IntoIterator<Item = &'a Value>,
        outer: (usize, usize),
    ) -> Result<(usize, usize)> {
        all.into_iter().try_fold(outer, |(alternatives, parts), part| {
            let own = self.of(part)?;
            Ok((alternatives.saturating_add(own.0 - 1), parts.saturating_add(own.1)))
        })
    }

    fn of_reference(&mut self, name: &'a str) -> Result<(usize, usize)> {
        if let Some(&known) = self.known.get(name) {
            return Ok(known);
        }
        self.known.insert(name, (1, 1));
        let part = name.strip_prefix('#').and_then(|place| self.root.pointer(place));
        let cost = part.map_or(Ok((1, 1)), |part| self.of(part))?;
        self.known.insert(name, cost);
        Ok(cost)
    }
}

/// A grammar, and where a text is in it.
pub(super) struct Grammar {
    matcher: Matcher,
    /// The tokens that it knows.
    vocabulary: usize,
}

impl Grammar {
    /// Another one at the same place.
    pub(super) fn fork(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), vocabulary: self.vocabulary }
    }
}

impl TokenConstraint for Grammar {
    fn mask(&mut self, allowed: &mut TokenMask) -> Result<()> {
        if self.matcher.is_stopped() && self.matcher.get_error().is_none() {
            return Ok(());
        }
        let mask = self.matcher.compute_mask()?;
        for (word, mask) in allowed.words_mut().iter_mut().zip(mask.as_slice()) {
            *word |= mask;
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        if self.matcher.is_stopped() || token as usize >= self.vocabulary {
            return Ok(());
        }
        self.matcher.consume_token(token)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use candle_lm::tokens;
    use serde_json::json;

    use super::*;
    use crate::serve::vocabulary;

    fn grammars() -> Grammars {
        let texts = vocabulary::texts(&tokens::of_bytes().unwrap());
        Grammars::new(&texts, 300, &BTreeSet::new())
    }

    /// Whether a grammar lets a text through, and where it ends.
    fn takes(schema: &Value, text: &str) -> bool {
        let tokenizer = tokens::of_bytes().unwrap();
        let mut grammar = grammars().json(schema).unwrap();
        for token in tokens::encode(&tokenizer, text).unwrap() {
            let mut mask = TokenMask::new(300);
            grammar.mask(&mut mask).unwrap();
            if !mask.allows(token) {
                return false;
            }
            grammar.accept(token).unwrap();
        }
        let mut mask = TokenMask::new(300);
        grammar.mask(&mut mask).unwrap();
        // The end is a token that the model does not have.
        mask.words_mut()[9] &= !(1 << 12);
        mask == TokenMask::new(300)
    }

    #[test]
    fn texts_of_a_schema_pass_and_others_do_not() {
        let schema = json!({
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"$ref": "#/$defs/age"}},
            "required": ["name", "age"],
            "additionalProperties": false,
            "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
        });
        assert!(takes(&schema, r#"{"name": "Zoë", "age": 30}"#));
        for wrong in
            [r#"{"age": 30}"#, r#"{"name": "toolong", "age": 3}"#, r#"{"name": "a", "age": 121}"#, "Sure"]
        {
            assert!(!takes(&schema, wrong), "{wrong}");
        }
        assert!(takes(&json!({"type": "object"}), r#"{"a": {"b": [1, 2]}}"#));
        assert!(!takes(&json!({"type": "object"}), "[1]"));
        // Alternatives, and a list of itself.
        let tree = json!({
            "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}],
            "$defs": {"node": {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "enum": (0..200).map(|i| format!("k{i}")).collect::<Vec<_>>()},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["kind"],
                "additionalProperties": false,
            }},
        });
        assert!(takes(&tree, r#"{"kind": "k7", "children": [{"kind": "k199"}]}"#) && takes(&tree, "null"));
    }

    #[test]
    fn bombs_are_refused_and_the_next_schema_works() {
        let mut deep = json!({"type": "string"});
        for _ in 0..200 {
            deep = json!({"type": "object", "properties": {"a": deep}});
        }
        let wide: serde_json::Map<String, Value> =
            (0..20_000).map(|i| (format!("key{i}"), json!({"type": "string"}))).collect();
        let objects = |count: usize| vec![json!({"type": "object"}); count];
        let names: Vec<String> = (0..1000).map(|i| format!("n{i}")).collect();
        let mut doubled = serde_json::Map::from_iter([("d20".to_owned(), json!({"type": "object"}))]);
        for i in 0..20 {
            let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
            doubled.insert(format!("d{i}"), json!({"allOf": [next, next]}));
        }
        let bombs = [
            deep,
            json!({"type": "object", "properties": wide}),
            json!({"type": "string", "pattern": "foo("}),
            json!({"type": "string", "pattern": "(a*)\\1"}),
            json!({"type": "string", "pattern": "(".repeat(1000)}),
            json!({"$ref": "#/$defs/missing"}),
            json!({"type": "no type"}),
            // Parts that must hold together multiply.
            json!({"allOf": [{"anyOf": objects(150)}, {"anyOf": objects(150)}, {"required": names}]}),
            json!({"anyOf": objects(150), "oneOf": objects(150)}),
            json!({"allOf": [{"properties": {"a": {"anyOf": objects(40)}}}, {"properties": {"a": {"anyOf": objects(40)}}}]}),
            json!({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"enum": (0..50).collect::<Vec<_>>()}}}),
            json!({"$ref": "#/$defs/d0", "$defs": doubled}),
        ];
        for bomb in bombs {
            let shown: String = bomb.to_string().chars().take(80).collect();
            assert!(grammars().json(&bomb).is_err(), "{shown}");
        }
        // What is known to be too much only where a text is, ends there.
        for bomb in [
            json!({"type": "string", "pattern": "(((((a{1,999}){1,999}){1,999}){1,999}){1,999}){1,999}"}),
            json!({"type": "string", "maxLength": 4_000_000_000u64, "minLength": 3_999_999_999u64}),
            json!({"anyOf": (0..500).map(|i| json!({"pattern": format!(".*{i}.*{i}.*")})).collect::<Vec<_>>()}),
        ] {
            if let Ok(mut grammar) = grammars().json(&bomb) {
                for token in tokens::encode(&tokens::of_bytes().unwrap(), "\"aaaa").unwrap() {
                    grammar.mask(&mut TokenMask::new(300)).ok();
                    grammar.accept(token).ok();
                }
            }
        }
        assert!(takes(&json!({"type": "boolean"}), "true"));
    }
}
