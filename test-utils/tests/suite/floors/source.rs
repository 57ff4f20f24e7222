//! Reads the modules of a crate, and the paths by which they name each other, from the source.
//!
//! It reads tokens only. Comments and items for tests are ignored; bodies of macros count.
use proc_macro2::{Delimiter, Group, Spacing, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The names that lead from the root of a crate to a module or an item.
pub(super) type Place = Vec<String>;

/// The names in one module.
#[derive(Debug, Default)]
pub(super) struct Module {
    pub(super) children: BTreeSet<String>,
    /// Every place that the module names: as written, and behind each re-export on the way.
    ///
    /// What a folder's own file passes on from inside of the folder, and does not use itself, is left out.
    pub(super) named: BTreeSet<Place>,
    /// Paths as they are written.
    written: Vec<Place>,
    /// Those that `pub use` passes on.
    passed_on: Vec<Place>,
    /// All words of the module outside of `use`.
    words: BTreeSet<String>,
    /// Names that `use` brings in, with the paths as they are written.
    names: BTreeMap<String, Place>,
}

/// All modules of a crate.
#[derive(Debug, Default)]
pub(super) struct Source {
    pub(super) modules: BTreeMap<Place, Module>,
    /// Macros, with the modules that define them.
    macros: BTreeMap<String, Place>,
}

/// Gives the text of a file, if there is one.
type Text<'a> = &'a dyn Fn(&Path) -> Option<String>;

impl Source {
    /// Reads the crate whose `lib.rs` lies in `folder`.
    pub(super) fn of_crate(folder: &Path) -> Self {
        Self::read(folder, &|file| std::fs::read_to_string(file).ok())
    }

    /// Like [`of_crate`](Self::of_crate) with another source of text.
    pub(super) fn read(folder: &Path, text: Text<'_>) -> Self {
        let mut source = Self::default();
        source.file(&[], &folder.join("lib.rs"), folder, text);
        let named: Vec<BTreeSet<Place>> = source.modules.keys().map(|place| source.named_by(place)).collect();
        source.modules.values_mut().zip(named).for_each(|(module, named)| module.named = named);
        source
    }

    /// Reads the module at `place` from `file`; its children's files lie in `folder`.
    fn file(&mut self, place: &[String], file: &Path, folder: &Path, text: Text<'_>) {
        let code = text(file).unwrap_or_else(|| panic!("there is no file {}", file.display()));
        let tokens: TokenStream = code.parse().unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let mut filed = Vec::new();
        self.tokens(place, tokens, &mut filed);
        for child in filed {
            let [around @ .., name] = &child[place.len()..] else { continue };
            let folder = around.iter().fold(folder.to_path_buf(), |folder, name| folder.join(name));
            let (flat, inside) = (folder.join(format!("{name}.rs")), folder.join(name));
            let file = if text(&flat).is_some() { flat } else { inside.join("mod.rs") };
            self.file(&child, &file, &inside, text);
        }
    }

    /// Notes what the module at `place` says; `filed` gets the modules that have files of their own.
    fn tokens(&mut self, place: &[String], tokens: TokenStream, filed: &mut Vec<Place>) {
        self.modules.entry(place.to_vec()).or_default();
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let rest = &tokens[at..];
            at += match token {
                TokenTree::Punct(punct) if punct.as_char() == '#' => match rest.get(1) {
                    Some(TokenTree::Group(group)) if is_for_tests(group) => item_len(rest),
                    _ => 1,
                },
                TokenTree::Ident(ident) if ident == "use" && !is_punct(rest.get(1), '<') => {
                    let len = rest.iter().position(|token| is_punct(Some(token), ';')).unwrap_or(rest.len());
                    let paths = self.uses(place, &Place::new(), &rest[1..len]);
                    let module = self.module(place);
                    match at.checked_sub(1).is_some_and(|before| is_public(&tokens[..=before])) {
                        true => module.passed_on.extend(paths),
                        false => module.written.extend(paths),
                    }
                    len
                }
                TokenTree::Ident(ident) if ident == "mod" => self.child(place, rest, filed),
                TokenTree::Ident(ident) if ident == "macro_rules" => {
                    if let Some(TokenTree::Ident(name)) = rest.get(2) {
                        self.macros.insert(name.to_string(), place.to_vec());
                    }
                    1
                }
                TokenTree::Ident(ident) if ident == "pub" => 1 + usize::from(is_visibility(rest.get(1))),
                TokenTree::Ident(_) => {
                    let (path, len) = path(rest);
                    let module = self.module(place);
                    module.words.extend(path.first().cloned());
                    if path.len() > 1 {
                        module.written.push(path);
                    }
                    len
                }
                // A path that begins with `::` is one of another crate.
                TokenTree::Punct(_) if is_colons(rest) => 2 + path(&rest[2..]).1,
                TokenTree::Group(group) => {
                    self.tokens(place, group.stream(), filed);
                    1
                }
                _ => 1,
            };
        }
    }

    fn module(&mut self, place: &[String]) -> &mut Module {
        self.modules.entry(place.to_vec()).or_default()
    }

    /// Notes the child whose declaration `tokens` begin with, and returns the length of it.
    fn child(&mut self, place: &[String], tokens: &[TokenTree], filed: &mut Vec<Place>) -> usize {
        let Some(TokenTree::Ident(name)) = tokens.get(1) else { return 1 };
        self.module(place).children.insert(name.to_string());
        let child = [place, &[name.to_string()]].concat();
        match tokens.get(2) {
            Some(TokenTree::Group(body)) => self.tokens(&child, body.stream(), filed),
            _ => filed.push(child),
        }
        3
    }

    /// Notes the names that the tree of a `use` brings, and returns its paths.
    fn uses(&mut self, place: &[String], prefix: &[String], tree: &[TokenTree]) -> Vec<Place> {
        let mut paths = Vec::new();
        if is_colons(tree) {
            return paths;
        }
        for branch in tree.split(|token| is_punct(Some(token), ',')).filter(|branch| !branch.is_empty()) {
            let (path, len) = path(branch);
            let mut whole = [prefix, &path].concat();
            let alias = match &branch[if path.is_empty() { 0 } else { len }..] {
                [TokenTree::Group(group)] => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    paths.extend(self.uses(place, &whole, &inner));
                    continue;
                }
                [TokenTree::Ident(_), TokenTree::Ident(alias)] => Some(alias.to_string()),
                [] => None,
                // `*`
                _ => {
                    paths.push([whole, vec!["*".to_string()]].concat());
                    continue;
                }
            };
            if path.last().is_some_and(|last| last == "self") && whole.len() > 1 {
                whole.pop();
            }
            if let Some(name) = alias.or_else(|| whole.last().cloned()) {
                self.module(place).names.insert(name, whole.clone());
            }
            paths.push(whole);
        }
        paths
    }

    /// The path from the root that a path written in the module at `place` stands for, unless it leads to another
    /// crate.
    fn whole_path(&self, place: &[String], path: &[String]) -> Option<Place> {
        let module = self.modules.get(place)?;
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([place, rest].concat()),
            "super" => {
                let ups = path.iter().take_while(|name| *name == "super").count();
                Some([&place[..place.len().checked_sub(ups)?], &path[ups..]].concat())
            }
            name if module.children.contains(name) => Some([place, path].concat()),
            name => match module.names.get(name) {
                Some(named) if named.first() != Some(first) => {
                    Some([self.whole_path(place, named)?, rest.to_vec()].concat())
                }
                _ => None,
            },
        }
    }

    fn named_by(&self, place: &[String]) -> BTreeSet<Place> {
        let module = &self.modules[place];
        let written = module.written.iter().filter_map(|path| self.whole_path(place, path));
        let passed_on = module.passed_on.iter().filter_map(|written| {
            let path = self.whole_path(place, written)?;
            // Under its own name or another one.
            let is_used = module.names.iter().any(|(name, of)| of == written && module.words.contains(name));
            (is_used || !path.starts_with(place)).then_some(path)
        });
        let mut open: Vec<Place> = written.chain(passed_on).collect();
        let mut all = BTreeSet::new();
        while let Some(path) = open.pop() {
            if all.insert(path.clone()) {
                open.extend(self.behind(&path));
            }
        }
        all
    }

    /// Where a path leads whose way goes through a name that a module has from elsewhere.
    fn behind(&self, path: &[String]) -> Option<Place> {
        let depth = (0..path.len()).find(|&depth| !self.modules.contains_key(&path[..=depth]))?;
        let (module, name) = (&path[..depth], &path[depth]);
        if let Some(target) = self.modules[module].names.get(name) {
            return Some([self.whole_path(module, target)?, path[depth + 1..].to_vec()].concat());
        }
        let home = self.macros.get(name).filter(|home| depth == 0 && !home.is_empty())?;
        Some([home.clone(), vec![name.clone()]].concat())
    }

    /// Whether the module at `place` has `name` from elsewhere.
    pub(super) fn is_passed_on(&self, place: &[String], name: &str) -> bool {
        self.modules[place].names.contains_key(name)
            || place.is_empty() && self.macros.get(name).is_some_and(|home| !home.is_empty())
    }
}

/// The path that `tokens` begin with, and its length in tokens, at least one.
fn path(tokens: &[TokenTree]) -> (Place, usize) {
    let (mut path, mut at) = (Place::new(), 0);
    while let Some(TokenTree::Ident(name)) = tokens.get(at) {
        path.push(name.to_string());
        at += 1;
        if !is_colons(&tokens[at..]) {
            break;
        }
        at += 2;
    }
    (path, at.max(1).min(tokens.len().max(1)))
}

fn is_punct(token: Option<&TokenTree>, char: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == char)
}

fn is_colons(tokens: &[TokenTree]) -> bool {
    matches!(tokens, [TokenTree::Punct(a), TokenTree::Punct(b), ..]
        if a.as_char() == ':' && a.spacing() == Spacing::Joint && b.as_char() == ':')
}

/// Whether `tokens` end in `pub`, or `pub(crate)` or the like.
fn is_public(tokens: &[TokenTree]) -> bool {
    let is_pub = |token: &TokenTree| matches!(token, TokenTree::Ident(word) if word == "pub");
    match tokens {
        [.., word, group] if is_pub(word) && is_visibility(Some(group)) => true,
        [.., word] => is_pub(word),
        [] => false,
    }
}

/// Whether this is the group of `pub(crate)` or the like.
fn is_visibility(token: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = token else { return false };
    let first = group.stream().into_iter().next();
    matches!(first, Some(TokenTree::Ident(name)) if ["crate", "super", "self", "in"].iter().any(|word| name == word))
}

/// Whether an attribute marks an item that exists in tests only.
fn is_for_tests(attribute: &Group) -> bool {
    let is_test = |token: &TokenTree| matches!(token, TokenTree::Ident(name) if name == "test");
    let tokens: Vec<TokenTree> = attribute.stream().into_iter().collect();
    match &tokens[..] {
        [name] => is_test(name),
        [TokenTree::Ident(cfg), TokenTree::Group(what)] if cfg == "cfg" => {
            match &what.stream().into_iter().collect::<Vec<_>>()[..] {
                [name] => is_test(name),
                [TokenTree::Ident(all), TokenTree::Group(parts)] if all == "all" => {
                    parts.stream().into_iter().any(|part| is_test(&part))
                }
                _ => false,
            }
        }
        _ => false,
    }
}

/// The length of the item that `tokens` begin with.
fn item_len(tokens: &[TokenTree]) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        token => is_punct(Some(token), ';'),
    };
    tokens.iter().position(ends).map_or(tokens.len(), |at| at + 1)
}
