//! Which module may name which: the floors of the crate, as `layers.txt` lists them.
//!
//! Read is what the compiler reads: every path that begins with `crate`, `super`, `self` or a module that the file
//! declares, wherever it stands, but for what is compiled for tests only, comments and documentation. Names that a module
//! hands on (`pub use child::Name`) count as those of the module that they come from, and as named by it where it uses
//! them itself.

mod read;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use read::{File, read};

const RULES: &str = "xtask/layers.txt";
/// A folder's `mod.rs`, in its line.
const OWN: &str = "mod";

/// A module's path below the crate's root.
type Module = Vec<String>;

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
