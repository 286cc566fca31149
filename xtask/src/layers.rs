//! Which module may name which: the floors of the crate, as `layers.txt` lists them.
//!
//! Read is what the compiler reads: every path that begins with `crate`, `super`, `self` or a module that the file
//! declares, wherever it stands, but for what is compiled for tests only, comments and documentation. Names that a module
//! hands on (`pub use child::Name`) count as those of the module that they come from, and as named by it where it uses
//! them itself.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

const RULES: &str = "xtask/layers.txt";
/// A folder's `mod.rs`, in its line.
const OWN: &str = "mod";

/// A module's path below the crate's root.
type Module = Vec<String>;

/// A path that a file names.
#[derive(Debug, Clone)]
struct Named {
    line: usize,
    path: Module,
}

/// The parts of a file that matter here.
#[derive(Debug, Default)]
struct File {
    named: Vec<Named>,
    /// Names of children that it hands on, and where they come from.
    handed: HashMap<String, Module>,
    /// Modules that are compiled for tests only.
    tests: Vec<Module>,
    /// Lines that say `dyn Any`.
    erased: Vec<usize>,
    /// Whether it holds more than modules and names that it hands on.
    has_items: bool,
}

/// The list: each module, what it may name beside itself, and the files of a folder from the lowest up.
#[derive(Debug, Default)]
struct Rules {
    layers: Vec<(String, BTreeSet<String>)>,
    /// By the folder's path, `cpu/router`.
    inside: BTreeMap<String, Vec<BTreeSet<String>>>,
}

impl Rules {
    fn parse(text: &str) -> Result<Self, String> {
        let mut rules = Self::default();
        for (i, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let fault = |what: &str| format!("{RULES}:{}: {what}: {line}", i + 1);
            let (name, rest) = line.split_once(':').ok_or_else(|| fault("no colon"))?;
            let words = rest.split_whitespace().map(str::to_string);
            if let Some(folder) = name.strip_prefix("inside ") {
                let groups = words.map(|group| group.split('+').map(str::to_string).collect()).collect();
                rules.inside.insert(folder.to_string(), groups);
                continue;
            }
            let may: BTreeSet<String> = words.collect();
            if let Some(unknown) = may.iter().find(|m| !rules.layers.iter().any(|(known, _)| known == *m)) {
                return Err(fault(&format!("{unknown} is not above this line, where what is below stands")));
            }
            rules.layers.push((name.to_string(), may));
        }
        Ok(rules)
    }

    /// Why the file `from`, one of `all`, may not name `to`; `None` where it may.
    fn broken(&self, all: &BTreeMap<Module, File>, from: &[String], to: &[String]) -> Option<String> {
        let (Some(from_top), Some(to_top)) = (from.first(), to.first()) else { return None };
        let Some((_, may)) = self.layers.iter().find(|(name, _)| name == from_top) else {
            return Some(format!("{from_top} has no line in {RULES}"));
        };
        if from_top != to_top {
            let known = || may.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            return (!may.contains(to_top)).then(|| format!("{from_top} may name: {}", known()));
        }
        // In the folder where the two part, each is in a file or a folder of its own, or in the folder's `mod.rs`.
        let shared = from.iter().zip(to).take_while(|(a, b)| a == b).count();
        if to.len() == shared {
            return None;
        }
        let child = |path: &[String]| path.get(shared).filter(|_| exists(all, &path[..=shared])).cloned();
        let [own, other] = [from, to].map(|path| child(path).unwrap_or_else(|| OWN.to_string()));
        let folder = from[..shared].join("/");
        let (own_place, other_place) = (self.place(&folder, &own)?, self.place(&folder, &other)?);
        (other_place > own_place).then(|| format!("inside {folder}, {other} stands above {own}"))
    }

    /// Where a file or folder stands in its folder's line.
    fn place(&self, folder: &str, name: &str) -> Option<usize> {
        self.inside.get(folder)?.iter().position(|group| group.contains(name))
    }
}

/// Whether a module is a file, or a folder of files.
fn exists(all: &BTreeMap<Module, File>, path: &[String]) -> bool {
    all.range(path.to_vec()..).next().is_some_and(|(module, _)| module.starts_with(path))
}

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

fn read(text: &str, module: &[String]) -> Result<File, String> {
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

/// All files below a folder, and their modules. The programs in `bin` are crates of their own.
fn files(src: &Path) -> Result<Vec<(PathBuf, Module)>, String> {
    let mut found = Vec::new();
    let mut folders = vec![(src.to_path_buf(), Module::new())];
    while let Some((folder, module)) = folders.pop() {
        let entries = std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for entry in entries {
            let path = entry.map_err(|e| e.to_string())?.path();
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if stem != "bin" {
                    folders.push((path, [&module[..], &[stem]].concat()));
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                let own = match stem.as_str() {
                    "mod" | "lib" => module.clone(),
                    _ => [&module[..], &[stem]].concat(),
                };
                found.push((path, own));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Follows what modules hand on to the module that a name comes from.
fn origin(read: &BTreeMap<Module, File>, path: &Module) -> Module {
    let mut path = path.clone();
    for _ in 0..8 {
        let next = (0..path.len()).find_map(|i| {
            let (module, rest) = path.split_at(i);
            let handed = &read.get(module)?.handed;
            let to = handed.get(rest.first()?)?;
            Some([&to[..], &rest[1..]].concat())
        });
        match next {
            Some(next) if next != path => path = next,
            _ => break,
        }
    }
    path
}

pub(super) fn run() -> Result<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("the repository's folder is not to be found")?;
    let rules = std::fs::read_to_string(root.join(RULES)).map_err(|e| format!("{RULES}: {e}"))?;
    let (rules, src) = (Rules::parse(&rules)?, root.join("src"));
    let mut all = BTreeMap::new();
    let mut places = BTreeMap::new();
    for (path, module) in files(&src)? {
        let shown = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{shown}: {e}"))?;
        all.insert(module.clone(), read(&text, &module).map_err(|e| format!("{shown}: {e}"))?);
        places.insert(module, shown);
    }
    let mut problems = problems_of(&rules, &all, &places);
    problems.extend(stale(&rules, &all));
    problems.extend(unlisted(&rules, &all));
    match problems.is_empty() {
        true => Ok(format!("{} files keep to {RULES}", all.len())),
        false => {
            let count = problems.len();
            let mut text = problems.join("\n");
            let _ = write!(text, "\n{count} names that {RULES} does not allow");
            Err(text)
        }
    }
}

/// The files that are not for tests alone.
fn shipped(all: &BTreeMap<Module, File>) -> impl Iterator<Item = (&Module, &File)> {
    let tests: Vec<&Module> = all.values().flat_map(|file| &file.tests).collect();
    all.iter().filter(move |(module, _)| !tests.iter().any(|test| module.starts_with(test)))
}

/// Everything that breaks a rule, with file, line and rule.
fn problems_of(rules: &Rules, all: &BTreeMap<Module, File>, places: &BTreeMap<Module, String>) -> Vec<String> {
    let mut problems = Vec::new();
    for (module, file) in shipped(all).filter(|(module, _)| !module.is_empty()) {
        let place = &places[module];
        for named in &file.named {
            let to = origin(all, &named.path);
            // A name of the crate's root that no module hands on is a module itself, or nothing.
            if let Some(rule) = rules.broken(all, module, &to) {
                let what = named.path.join("::");
                problems.push(format!("{place}:{}: names {what}; {rule}", named.line));
            }
        }
        for line in &file.erased {
            problems.push(format!("{place}:{line}: dyn Any; types are named here, not guessed"));
        }
    }
    problems.sort();
    problems.dedup();
    problems
}

/// Names of the list that no file has.
fn stale(rules: &Rules, all: &BTreeMap<Module, File>) -> Vec<String> {
    let layers = rules.layers.iter().map(|(name, _)| vec![name.clone()]);
    let inside = rules.inside.iter().flat_map(|(folder, groups)| {
        let folder: Module = folder.split('/').map(str::to_string).collect();
        let files = groups.iter().flatten().filter(|name| *name != OWN);
        files.map(move |file| [&folder[..], std::slice::from_ref(file)].concat())
    });
    layers
        .chain(inside)
        .filter(|path| !exists(all, path))
        .map(|path| format!("{RULES}: there is no {}", path.join("::")))
        .collect()
}

/// Files and folders that their folder's line lacks, and a `mod.rs` that holds more than modules and names that it hands
/// on. One that is alone needs no line.
fn unlisted(rules: &Rules, all: &BTreeMap<Module, File>) -> Vec<String> {
    let mut folders: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (module, _) in shipped(all) {
        for at in 1..module.len() {
            let (folder, names) = (&module[..at], folders.entry(module[..at].join("/")).or_default());
            names.insert(&module[at]);
            if all.get(folder).is_some_and(|own| own.has_items) {
                names.insert(OWN);
            }
        }
    }
    let several = folders.iter().filter(|(_, names)| names.len() > 1);
    let names = several.flat_map(|(folder, names)| names.iter().map(move |name| (folder, *name)));
    names
        .filter(|(folder, name)| rules.place(folder, name).is_none())
        .map(|(folder, name)| format!("{RULES}: the line `inside {folder}` lacks {name}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(path: &str) -> Module {
        path.split("::").filter(|s| !s.is_empty()).map(str::to_string).collect()
    }

    /// Files by module, and what is wrong with them.
    fn found(rules: &str, files: &[(&str, &str)]) -> Vec<String> {
        let rules = Rules::parse(rules).expect("rules");
        let all: BTreeMap<Module, File> =
            files.iter().map(|(m, text)| (module(m), read(text, &module(m)).expect("tokens"))).collect();
        let places = all.keys().map(|m| (m.clone(), m.join("/"))).collect();
        problems_of(&rules, &all, &places)
    }

    const RULES: &str = "low:\nhigh: low\ninside high: a b+c d\n";

    #[test]
    fn what_is_below_may_not_name_what_is_above() {
        let broken = found(RULES, &[("low", "\n\nfn f() { crate::high::g() }"), ("high", "use crate::low::f;")]);
        assert_eq!(broken, ["low:3: names high::g; low may name: "]);
    }

    #[test]
    fn braces_macros_and_names_that_the_root_hands_on_are_followed() {
        let root = ("", "mod low; mod high; pub use high::G;");
        for text in ["use crate::{low::f, high::{self, G}};", "m!(crate::high::g);", "type T = crate::G;"] {
            assert!(!found(RULES, &[root, ("low", text), ("high", "pub struct G;")]).is_empty(), "{text}");
        }
    }

    #[test]
    fn tests_comments_and_documentation_may_name_anything() {
        let text = "/// [`crate::high::G`]\nfn f() {} // crate::high\n#[cfg(test)]\nmod tests { use crate::high::G; }";
        assert!(found(RULES, &[("low", text), ("high", "")]).is_empty());
        let declared = ("low", "#[cfg(test)]\nmod tests;");
        assert!(found(RULES, &[declared, ("low::tests", "use crate::high::G;"), ("high", "")]).is_empty());
    }

    #[test]
    fn files_of_a_folder_name_those_before_them_and_those_of_their_group() {
        let files = [("high::a", "use super::b::B;"), ("high::b", "use super::c::C; use super::a::A;")];
        let more = [("high::c", "use crate::high::b::B;"), ("high::d", "use super::a::A;"), ("high", "mod a;")];
        let broken = found(RULES, &[&files[..], &more[..]].concat());
        assert_eq!(broken, ["high/a:1: names high::b::B; inside high, b stands above a"]);
        let handed = [("high::a", "use super::D;"), ("high", "pub use d::D;"), ("high::d", "pub struct D;")];
        assert_eq!(found(RULES, &handed), ["high/a:1: names high::D; inside high, d stands above a"]);
    }

    #[test]
    fn names_of_no_file_are_refused() {
        let rules = Rules::parse(RULES).expect("rules");
        let files = |names: &[&str]| names.iter().map(|name| (module(name), File::default())).collect();
        let all = files(&["low", "high::a", "high::b", "high::d"]);
        assert_eq!(stale(&rules, &all), ["xtask/layers.txt: there is no high::c"]);
        let all = files(&["low", "high::a", "high::b", "high::c::inner", "high::d"]);
        assert!(stale(&rules, &all).is_empty());
        let rules = Rules::parse("high:\ninside high/c: inner outer\n").expect("rules");
        assert_eq!(stale(&rules, &all), ["xtask/layers.txt: there is no high::c::outer"]);
    }

    #[test]
    fn folders_in_folders_have_an_order_of_their_own() {
        let rules = format!("{RULES}inside high/c: x y\n");
        let files = [("high::c::x", "use crate::high::c::y::Y;"), ("high::c::y", "use super::x::X; use super::Own;")];
        let broken = found(&rules, &[&files[..], &[("high::c", "struct Own;")]].concat());
        assert_eq!(broken, ["high/c/x:1: names high::c::y::Y; inside high/c, y stands above x"]);
        // Outside their folder they stand where it does.
        let files = [("high::c::x", "use crate::high::a::A; use crate::high::d::D;"), ("high::a", ""), ("high::d", "")];
        assert_eq!(found(&rules, &files), ["high/c/x:1: names high::d::D; inside high, d stands above c"]);
    }

    #[test]
    fn a_mod_rs_stands_among_the_files_of_its_folder() {
        fn files(own: &str) -> [(&str, &str); 4] {
            [("high", own), ("high::a", "pub struct A;"), ("high::b", "use super::{a::A, Own};"), ("high::d", "")]
        }
        let rules = "high:\ninside high: a mod b d\n";
        assert!(found(rules, &files("mod a; mod b; mod d; pub use d::D; use a::A; struct Own;")).is_empty());
        for above in ["use b::B;", "fn f() { b::g() }", "use self::b::B;", "use crate::high::b;"] {
            let broken = found(rules, &files(&format!("mod a; mod b;\n{above}")));
            let rule = ["inside high, b stands above mod"];
            assert_eq!(broken.iter().filter_map(|b| b.split("; ").nth(1)).collect::<Vec<_>>(), rule, "{above}");
        }
        let above = found("high:\ninside high: a b mod d\n", &files("mod a; struct Own;"));
        assert_eq!(above, ["high/b:1: names high::Own; inside high, mod stands above b"]);
        // What a module calls by a child's name is another's inside another module.
        let inner = [("high", "mod b; mod inner { fn f() { b::g() } }"), ("high::b", ""), ("high::a", "")];
        assert!(found(rules, &inner).is_empty());
    }

    #[test]
    fn every_file_of_a_folder_of_several_is_listed() {
        let rules = Rules::parse(RULES).expect("rules");
        let all = |names: &[&str]| -> BTreeMap<Module, File> {
            names.iter().map(|name| (module(name), File::default())).collect()
        };
        assert!(unlisted(&rules, &all(&["", "low", "low::alone", "high::a", "high::c::alone"])).is_empty());
        assert_eq!(
            unlisted(&rules, &all(&["high::a", "high::e", "high::c::x", "high::c::y"])),
            ["high e", "high/c x", "high/c y"]
                .map(|at| at.split_once(' ').expect("two"))
                .map(|(folder, name)| format!("xtask/layers.txt: the line `inside {folder}` lacks {name}"))
        );
        let mut with_tests = all(&["low", "low::alone", "low::tests"]);
        with_tests.entry(module("low")).or_default().tests.push(module("low::tests"));
        assert!(unlisted(&rules, &with_tests).is_empty());
    }

    #[test]
    fn a_mod_rs_with_items_is_listed() {
        let rules = Rules::parse("high:\ninside high: a b\n").expect("rules");
        let lacks = |own: &str, rules: &Rules| -> Vec<String> {
            let files = [("high", own), ("high::a", ""), ("high::b", "")];
            let all = files.map(|(m, text)| (module(m), read(text, &module(m)).expect("tokens")));
            unlisted(rules, &all.into_iter().collect())
        };
        let without = "//! Docs.\n#![allow(x)]\npub(crate) mod a; mod b; /// More.\npub use a::{A, B}; use crate::low::C;\n\
             #[cfg(test)] mod tests { fn f() {} }\n#[cfg(doctest)]\nstruct Page;\nmod names { pub use super::a::A; }";
        assert!(lacks(without, &rules).is_empty());
        let items = ["struct Own;", "/// Own.\npub(super) fn f() {}", "impl A {}", "const N: usize = 1;", "m!();"];
        for item in items.into_iter().chain(["mod inner { fn f() {} }", "#[cfg(unix)]\nstruct Own;"]) {
            let own = format!("{without}\n{item}\n");
            assert_eq!(lacks(&own, &rules), ["xtask/layers.txt: the line `inside high` lacks mod"], "{item}");
            let listed = Rules::parse("high:\ninside high: a mod b\n").expect("rules");
            assert!(lacks(&own, &listed).is_empty(), "{item}");
        }
        // With one file beside it, they are two.
        let alone: BTreeMap<Module, File> = [("high", "struct Own; mod a;"), ("high::a", "use super::Own;")]
            .map(|(m, text)| (module(m), read(text, &module(m)).expect("tokens")))
            .into_iter()
            .collect();
        let rules = Rules::parse("high:\n").expect("rules");
        assert_eq!(unlisted(&rules, &alone).len(), 2);
    }

    #[test]
    fn a_mod_rs_names_what_it_hands_on_and_uses() {
        let rules = "high:\ninside high: mod b\n";
        let files = |own: &'static str| [("high", own), ("high::b", "pub struct B; use super::Own;")];
        assert!(found(rules, &files("mod b; pub use b::B; struct Own;")).is_empty());
        let broken = found(rules, &files("mod b; pub use b::B;\nstruct Own(B);"));
        assert_eq!(broken, ["high:2: names high::b::B; inside high, b stands above mod"]);
        for other in ["fn f() { x.B() }", "fn f() { x::B }", "#[cfg(test)] mod tests { fn f(b: B) {} }"] {
            let own: &'static str = format!("mod b; pub use b::B;\nstruct Own; {other}").leak();
            assert!(found(rules, &files(own)).is_empty(), "{other}");
        }
    }

    #[test]
    fn erased_types_and_modules_without_a_line_are_refused() {
        assert_eq!(found(RULES, &[("low", "fn f(a: &dyn std::any::Any) {}")]).len(), 1);
        assert_eq!(found(RULES, &[("other", "use crate::low::f;"), ("low", "")]).len(), 1);
        assert!(Rules::parse("low: high\nhigh:").is_err());
    }
}
