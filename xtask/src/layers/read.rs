//! What a file names, by its tokens.

use std::collections::{BTreeSet, HashMap};

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

use super::Module;

/// A path that a file names.
#[derive(Debug, Clone)]
pub(super) struct Named {
    pub(super) line: usize,
    pub(super) path: Module,
}

/// The parts of a file that matter here.
#[derive(Debug, Default)]
pub(super) struct File {
    pub(super) named: Vec<Named>,
    /// Names of children that it hands on, and where they come from.
    pub(super) handed: HashMap<String, Module>,
    /// Modules that are compiled for tests only.
    pub(super) tests: Vec<Module>,
    /// Lines that say `dyn Any`.
    pub(super) erased: Vec<usize>,
    /// Whether it holds more than modules and names that it hands on.
    pub(super) has_items: bool,
}

/// The list: each module, what it may name beside itself, and the files of a folder from the lowest up.
/// Reads the tokens of a file or of a part of it.
struct Reader<'a> {
    file: &'a mut File,
    /// Modules that the file declares.
    children: &'a BTreeSet<String>,
    /// The module that the tokens are in.
    module: Module,
    /// The file's own module.
    of_file: &'a [String],
}

impl Reader<'_> {
    fn read(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut i = 0;
        while i < tokens.len() {
            if is_for_tests(&tokens, i) {
                i = self.skip(&tokens, i + 2);
                continue;
            }
            if let (Some("mod"), Some(name), Some(TokenTree::Group(body))) =
                (word(&tokens, i).as_deref(), word(&tokens, i + 1), tokens.get(i + 2))
            {
                self.module.push(name);
                self.read(body.stream());
                self.module.pop();
                i += 3;
                continue;
            }
            if word(&tokens, i).as_deref() == Some("dyn") {
                self.erased(&tokens, i + 1);
            }
            if word(&tokens, i).as_deref() == Some("use") {
                self.hand_on(&tokens, i + 1);
                if is_public(&tokens, i) && self.is_child(&tokens, i + 1) {
                    i = self.skip(&tokens, i + 1);
                    continue;
                }
            }
            let begins = matches!(word(&tokens, i).as_deref(), Some("crate" | "super" | "self"));
            if (begins || self.is_child(&tokens, i)) && !colons(&tokens, i.wrapping_sub(2)) && colons(&tokens, i + 1) {
                i = self.path(&tokens, i);
                continue;
            }
            if let TokenTree::Group(group) = &tokens[i] {
                self.read(group.stream());
            }
            i += 1;
        }
    }

    fn is_child(&self, tokens: &[TokenTree], i: usize) -> bool {
        self.module == self.of_file && word(tokens, i).is_some_and(|name| self.children.contains(&name))
    }

    /// The end of an item, and the module that it declares for tests.
    fn skip(&mut self, tokens: &[TokenTree], i: usize) -> usize {
        let end = end_of_item(tokens, i);
        for i in i..end {
            if let (Some("mod"), Some(name)) = (word(tokens, i).as_deref(), word(tokens, i + 1)) {
                self.file.tests.push([&self.module[..], &[name]].concat());
            }
        }
        end
    }

    /// Whether the trait object is an `Any`, by whatever path.
    fn erased(&mut self, tokens: &[TokenTree], mut i: usize) {
        let line = tokens.get(i).map_or(0, |t| t.span().start().line);
        while colons(tokens, i + 1) {
            i += 3;
        }
        if word(tokens, i).as_deref() == Some("Any") {
            self.file.erased.push(line);
        }
    }

    /// Reads a path with all that its braces hold; where it ends.
    fn path(&mut self, tokens: &[TokenTree], i: usize) -> usize {
        let line = tokens[i].span().start().line;
        let mut at = self.module.clone();
        match word(tokens, i).as_deref() {
            Some("crate") => at.clear(),
            Some("super") => drop(at.pop()),
            Some("self") | None => {}
            Some(child) => at.push(child.to_string()),
        }
        self.tree(tokens, i + 1, (at, line))
    }

    /// The rest of a path, from its colons on.
    fn tree(&mut self, tokens: &[TokenTree], mut i: usize, (mut at, line): (Module, usize)) -> usize {
        while colons(tokens, i) {
            match tokens.get(i + 2) {
                Some(TokenTree::Ident(ident)) if *ident == "super" => drop(at.pop()),
                Some(TokenTree::Ident(ident)) => at.push(ident.to_string()),
                Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    for part in split(&inner) {
                        let line = part.first().map_or(line, |t| t.span().start().line);
                        let mut at = at.clone();
                        match word(part, 0).as_deref() {
                            Some("super") => drop(at.pop()),
                            Some("self") | None => {}
                            Some(name) => at.push(name.to_string()),
                        }
                        self.tree(part, 1, (at, line));
                    }
                    return i + 3;
                }
                _ => break,
            }
            i += 3;
        }
        self.file.named.push(Named { line, path: at });
        i
    }

    /// Names of its children that a module hands on: `use child::Name`, `use child::{Name, Other}`.
    fn hand_on(&mut self, tokens: &[TokenTree], i: usize) {
        let Some(first) = word(tokens, i).filter(|w| !matches!(w.as_str(), "crate" | "super" | "self")) else {
            return;
        };
        if !colons(tokens, i + 1) || self.module != self.of_file {
            return;
        }
        let mut read = File::default();
        let (module, of_file, children) = (self.module.clone(), self.of_file, self.children);
        let mut reader = Reader { file: &mut read, children, module, of_file };
        let at = [&self.module[..], &[first]].concat();
        reader.tree(tokens, i + 1, (at, 0));
        for named in read.named {
            if let Some(name) = named.path.last() {
                self.file.handed.insert(name.clone(), named.path.clone());
            }
        }
    }
}

fn word(tokens: &[TokenTree], i: usize) -> Option<String> {
    match tokens.get(i)? {
        TokenTree::Ident(ident) => Some(ident.to_string()),
        _ => None,
    }
}

fn colons(tokens: &[TokenTree], i: usize) -> bool {
    let colon = |i: usize, joint: bool| matches!(tokens.get(i), Some(TokenTree::Punct(p)) if p.as_char() == ':' && (!joint || p.spacing() == Spacing::Joint));
    i < tokens.len() && colon(i, true) && colon(i + 1, false)
}

/// Whether an attribute keeps what follows for tests: `#[cfg(test)]`, `#[cfg(all(test, …))]`, `#[cfg(doctest)]`.
fn is_for_tests(tokens: &[TokenTree], i: usize) -> bool {
    let (Some(TokenTree::Punct(p)), Some(TokenTree::Group(g))) = (tokens.get(i), tokens.get(i + 1)) else {
        return false;
    };
    let text: String = g.stream().to_string().chars().filter(|c| !c.is_whitespace()).collect();
    let tests = ["cfg(test", "cfg(all(test", "cfg(doctest", "cfg(all(doctest"];
    p.as_char() == '#' && tests.iter().any(|test| text.starts_with(test))
}

/// Whether an item that begins here is handed on: `pub`, `pub(crate)`.
fn is_public(tokens: &[TokenTree], i: usize) -> bool {
    let is_pub = |at: Option<usize>| at.and_then(|at| word(tokens, at)).as_deref() == Some("pub");
    match i.checked_sub(1).and_then(|at| tokens.get(at)) {
        Some(TokenTree::Group(_)) => is_pub(i.checked_sub(2)),
        _ => is_pub(i.checked_sub(1)),
    }
}

/// Modules that are files of their own: `mod name;`.
fn declared(tokens: TokenStream) -> BTreeSet<String> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let ends = |i: usize| matches!(tokens.get(i), Some(TokenTree::Punct(p)) if p.as_char() == ';');
    let is_mod = |i: &usize| word(&tokens, *i).as_deref() == Some("mod") && ends(i + 2);
    (0..tokens.len()).filter(is_mod).filter_map(|i| word(&tokens, i + 1)).collect()
}

/// Words of a file that are no part of a longer path, but for those of `use` and of what is for tests.
fn bare_words(tokens: TokenStream, words: &mut Vec<(String, usize)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is = |i: usize, c: char| matches!(tokens.get(i), Some(TokenTree::Punct(p)) if p.as_char() == c);
    let mut i = 0;
    while i < tokens.len() {
        if is_for_tests(&tokens, i) {
            i = end_of_item(&tokens, i + 2);
            continue;
        }
        match &tokens[i] {
            TokenTree::Ident(ident) if *ident == "use" => {
                i = (i..tokens.len()).find(|&i| is(i, ';')).unwrap_or(i);
            }
            // The name of a module that it declares.
            TokenTree::Ident(ident) if *ident == "mod" => i += 1,
            TokenTree::Ident(ident) if !colons(&tokens, i.wrapping_sub(2)) && !is(i.wrapping_sub(1), '.') => {
                words.push((ident.to_string(), ident.span().start().line));
            }
            TokenTree::Group(group) => bare_words(group.stream(), words),
            _ => {}
        }
        i += 1;
    }
}

/// Where the item ends that `tokens` are in at `i`.
fn end_of_item(tokens: &[TokenTree], i: usize) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Punct(p) => matches!(p.as_char(), ';' | ','),
        TokenTree::Group(g) => g.delimiter() == Delimiter::Brace,
        _ => false,
    };
    (i..tokens.len()).find(|&i| ends(&tokens[i])).map_or(tokens.len(), |i| i + 1)
}

/// Whether anything stands in a file but modules, `use`, and what is for tests.
fn has_items(tokens: TokenStream) -> bool {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is = |i: usize, c: char| matches!(tokens.get(i), Some(TokenTree::Punct(p)) if p.as_char() == c);
    let mut i = 0;
    while i < tokens.len() {
        if is_for_tests(&tokens, i) {
            i = end_of_item(&tokens, i + 2);
            continue;
        }
        match (word(&tokens, i).as_deref(), tokens.get(i + 2)) {
            (Some("use"), _) => i = (i..tokens.len()).find(|&i| is(i, ';')).unwrap_or(i),
            (Some("mod"), Some(TokenTree::Group(body))) if has_items(body.stream()) => return true,
            (Some("mod"), _) => i += 2,
            _ if is(i, '#') => i += if is(i + 1, '!') { 2 } else { 1 },
            // What is before an item: `pub`, `pub(crate)`.
            (Some("pub"), _) => {}
            (None, _) if matches!(tokens[i], TokenTree::Group(_)) => {}
            // Behind the names that a test's `use` lists.
            _ if is(i, ';') => {}
            _ => return true,
        }
        i += 1;
    }
    false
}

fn split(tokens: &[TokenTree]) -> Vec<&[TokenTree]> {
    let comma = |t: &TokenTree| matches!(t, TokenTree::Punct(p) if p.as_char() == ',');
    tokens.split(comma).filter(|part| !part.is_empty()).collect()
}

pub(super) fn read(text: &str, module: &[String]) -> Result<File, String> {
    let tokens: TokenStream = text.parse().map_err(|e| format!("{e}"))?;
    let mut file = File { has_items: has_items(tokens.clone()), ..File::default() };
    let children = declared(tokens.clone());
    Reader { file: &mut file, children: &children, module: module.to_vec(), of_file: module }.read(tokens.clone());
    // A name that it hands on and names itself, it names without a path.
    let mut words = Vec::new();
    bare_words(tokens, &mut words);
    for (word, line) in words {
        if let Some(path) = file.handed.get(&word) {
            file.named.push(Named { line, path: path.clone() });
        }
    }
    Ok(file)
}
