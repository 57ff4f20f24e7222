//! The functions of a file, read from its tokens.
use proc_macro2::{Delimiter, Punct, Spacing, TokenStream, TokenTree};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A function of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    /// The type or trait that it is a method of; empty for a free function.
    pub(crate) owner: String,
    pub(crate) name: String,
    /// Whether it is `pub` without a limit, and no method of a trait.
    pub(crate) is_public: bool,
    /// The words of its signature.
    pub(crate) words: BTreeSet<String>,
}

/// The folder of the workspace.
pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns all Rust files below a folder.
pub(crate) fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Returns the functions of a file, in order.
pub(crate) fn functions(file: &Path) -> Vec<Function> {
    let mut found = Vec::new();
    collect(&tokens_of(file), "", false, &mut found);
    found
}

fn tokens_of(file: &Path) -> TokenStream {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    text.parse().unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Adds the functions of `tokens`, which lie in the block of `owner`.
fn collect(tokens: &TokenStream, owner: &str, of_trait: bool, found: &mut Vec<Function>) {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match word(Some(token)).as_deref() {
            Some("fn") => {
                let Some(name) = word(tokens.get(at + 1)) else {
                    at += 1; // the type of a function
                    continue;
                };
                let is_public = !of_trait && is_public(&tokens[..at]);
                let len = ending(&tokens[at..]);
                let mut words = BTreeSet::new();
                add_words(&tokens[at..at + len - 1], &mut words);
                found.push(Function { owner: owner.to_string(), name, is_public, words });
                // What is declared inside of a function is of no interest.
                at += len;
            }
            Some(keyword @ ("impl" | "trait")) => {
                let len = ending(&tokens[at..]);
                let (head, body) = (&tokens[at + 1..at + len - 1], &tokens[at + len - 1]);
                let (owner, is_trait) = subject(head);
                if let TokenTree::Group(body) = body {
                    collect(&body.stream(), &owner, is_trait || keyword == "trait", found);
                }
                at += len;
            }
            Some("mod") if matches!(tokens.get(at + 2), Some(TokenTree::Group(_))) => {
                if let (Some(name), Some(TokenTree::Group(body))) =
                    (word(tokens.get(at + 1)), tokens.get(at + 2))
                    && name != "tests"
                {
                    collect(&body.stream(), owner, of_trait, found);
                }
                at += 3;
            }
            _ => at += 1,
        }
    }
}

/// Adds all words of these tokens.
fn add_words(tokens: &[TokenTree], words: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(word) => {
                words.insert(word.to_string());
            }
            TokenTree::Group(group) => {
                add_words(&group.stream().into_iter().collect::<Vec<_>>(), words);
            }
            _ => {}
        }
    }
}

/// Returns the names of the types and traits that a file declares at its top.
pub(crate) fn types(file: &Path) -> Vec<String> {
    let tokens: Vec<TokenTree> = tokens_of(file).into_iter().collect();
    let is_declaration = |token: &TokenTree| {
        matches!(word(Some(token)).as_deref(), Some("struct" | "enum" | "trait" | "type"))
    };
    let declared = tokens.iter().zip(tokens.iter().skip(1)).filter(|(token, _)| is_declaration(token));
    declared.filter_map(|(_, name)| word(Some(name))).collect()
}

/// Returns the type that the head of an `impl` or a `trait` is about, and whether the methods are those of a trait.
fn subject(head: &[TokenTree]) -> (String, bool) {
    let (mut depth, mut last, mut is_trait) = (0, String::new(), false);
    for (at, token) in head.iter().enumerate() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '<' => depth += 1,
            // Not that of `->`.
            TokenTree::Punct(punct) if punct.as_char() == '>' && !follows_dash(&head[..at]) => depth -= 1,
            // The bounds of a trait, and no `::`.
            TokenTree::Punct(punct)
                if depth == 0 && punct.as_char() == ':' && !is_path(punct, &head[..at]) =>
            {
                break;
            }
            TokenTree::Ident(word) if depth == 0 => match word.to_string().as_str() {
                "for" => is_trait = true,
                "where" => break,
                name => last = name.to_string(),
            },
            _ => {}
        }
    }
    (last, is_trait)
}

/// Whether a colon is one of `::`.
fn is_path(colon: &Punct, before: &[TokenTree]) -> bool {
    let is_second = matches!(before.last(), Some(TokenTree::Punct(first))
        if first.as_char() == ':' && first.spacing() == Spacing::Joint);
    colon.spacing() == Spacing::Joint || is_second
}

fn follows_dash(before: &[TokenTree]) -> bool {
    matches!(before.last(), Some(TokenTree::Punct(punct)) if punct.as_char() == '-')
}

fn word(token: Option<&TokenTree>) -> Option<String> {
    match token {
        Some(TokenTree::Ident(word)) => Some(word.to_string()),
        _ => None,
    }
}

/// Whether the words before a `fn` have a `pub` without a limit.
fn is_public(before: &[TokenTree]) -> bool {
    let words = before.iter().rev().take_while(|token| match token {
        TokenTree::Ident(_) | TokenTree::Literal(_) => true,
        TokenTree::Group(group) => group.delimiter() == Delimiter::Parenthesis,
        TokenTree::Punct(_) => false,
    });
    let words: Vec<&TokenTree> = words.collect();
    words.iter().enumerate().any(|(at, token)| {
        let is_limited = at > 0 && matches!(words[at - 1], TokenTree::Group(_));
        word(Some(token)).as_deref() == Some("pub") && !is_limited
    })
}

/// The length of the item that `tokens` begin with.
fn ending(tokens: &[TokenTree]) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(punct) => punct.as_char() == ';',
        _ => false,
    };
    tokens.iter().position(ends).map_or(tokens.len(), |at| at + 1)
}
