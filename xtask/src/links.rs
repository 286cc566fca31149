//! Links between this repository's documents: each relative one leads to a file, and each anchor to a heading. Paths of
//! the repository that the guide names in backticks exist.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Where documents are, beside the root's own.
const FOLDERS: [&str; 5] = ["docs", "kernels", "models", "tests", "benches/results"];

/// Folders by which a name in backticks is known as a path of the repository.
const PLACES: [&str; 11] = [
    "src/",
    "kernels/",
    "docs/",
    "tests/",
    "benches/",
    "examples/",
    "scripts/",
    "xtask/",
    "models/",
    "fuzz/",
    "build/",
];

/// A link of a document.
#[derive(Debug, PartialEq)]
struct Link {
    line: usize,
    target: String,
}

pub(super) fn run(arguments: &[String]) -> Result<String, String> {
    if let Some(unknown) = arguments.first() {
        return Err(format!("links: {unknown}: no argument is taken"));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("the repository's folder is not to be found")?;
    let mut documents = documents(root, false)?;
    for folder in FOLDERS {
        documents.extend(self::documents(&root.join(folder), true)?);
    }
    let (mut count, mut paths, mut problems, mut anchors) = (0, 0, Vec::new(), BTreeMap::new());
    for document in &documents {
        let text = read(document)?;
        let place = document.strip_prefix(root).unwrap_or(document);
        let shown = place.display();
        for path in if names_paths(place) { named_paths(&text) } else { Vec::new() } {
            paths += 1;
            if !is_path_of(root, &path.target) {
                problems.push(format!("{shown}, line {}: `{}`: no such path", path.line, path.target));
            }
        }
        for link in links(&text) {
            count += 1;
            if let Some(problem) = check(document, &link.target, &mut anchors)? {
                problems.push(format!("{shown}, line {}: {}: {problem}", link.line, link.target));
            }
        }
    }
    match problems.is_empty() {
        true => Ok(format!("{count} links and {paths} paths in {} documents lead somewhere", documents.len())),
        false => Err(format!("links and paths that lead nowhere:\n  {}", problems.join("\n  "))),
    }
}

/// Whether a name is a path of the repository; one without an extension may be a Rust file's.
fn is_path_of(root: &Path, name: &str) -> bool {
    root.join(name).exists() || !name.ends_with('/') && root.join(format!("{name}.rs")).exists()
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Markdown files of a folder, with those below it or without.
fn documents(folder: &Path, below: bool) -> Result<Vec<PathBuf>, String> {
    let failed = |e| format!("{}: {e}", folder.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if below && path.is_dir() {
            found.extend(documents(&path, true)?);
        } else if path.extension().is_some_and(|e| e == "md") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Why a link leads nowhere. Addresses of other hosts are not asked.
fn check(
    document: &Path,
    target: &str,
    anchors: &mut BTreeMap<PathBuf, BTreeSet<String>>,
) -> Result<Option<String>, String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(None);
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let file = match path {
        "" => document.to_path_buf(),
        path => document.parent().unwrap_or(Path::new("")).join(path),
    };
    if !file.exists() {
        return Ok(Some("no such file".into()));
    }
    let Some(anchor) = anchor else { return Ok(None) };
    if file.extension().is_none_or(|e| e != "md") {
        return Ok(Some("only documents have anchors".into()));
    }
    if !anchors.contains_key(&file) {
        anchors.insert(file.clone(), headings(&read(&file)?));
    }
    Ok((!anchors[&file].contains(anchor)).then(|| "no such heading".into()))
}

/// The lines that are no code, with code spans blanked, and their numbers from 1.
fn prose(text: &str) -> Vec<(usize, String)> {
    let (mut fence, mut lines) = (None, Vec::new());
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|mark| trimmed.starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) => lines.push((number + 1, line.to_string())),
            _ => {}
        }
    }
    lines
}

/// Whether a document's names are today's: the guide, the rules and the notes. The list of former names and the
/// CHANGELOG are not held to it.
fn names_paths(document: &Path) -> bool {
    let folder = document.parent().unwrap_or(Path::new(""));
    let file = document.file_name().unwrap_or_default();
    match folder.to_str() {
        Some("") => file == "README.md" || file == "CONTRIBUTING.md",
        Some("docs") => file != "former-names.md",
        Some("kernels" | "kernels/notes" | "models" | "models/kernels" | "models/small") => true,
        Some("benches/results") => file == "README.md",
        _ => false,
    }
}

/// Names in backticks that are paths of the repository: from its root, to a folder or to a file. Patterns (`*`, `{a,b}`)
/// and commands are none.
fn named_paths(text: &str) -> Vec<Link> {
    let is_path = |name: &&str| {
        let known = PLACES.iter().any(|place| name.starts_with(place));
        known && name.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
    };
    let mut found = Vec::new();
    for (line, text) in prose(text) {
        let names = text.split('`').skip(1).step_by(2).filter(is_path);
        found.extend(names.map(|name| Link { line, target: name.to_string() }));
    }
    found
}

/// A line without what stands between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("")
}

/// `[text](target)`, `![text](target)` and `[name]: target`. A target stands on one line.
fn links(text: &str) -> Vec<Link> {
    let mut found = Vec::new();
    for (line, text) in prose(text) {
        let text = without_code(&text);
        for part in text.split("](").skip(1) {
            let target = part.split([')', ' ']).next().unwrap_or_default();
            found.push(Link { line, target: target.to_string() });
        }
        if let Some((name, target)) = text.split_once("]: ")
            && name.starts_with('[')
            && !name.starts_with("[^")
        {
            found.push(Link { line, target: target.split(' ').next().unwrap_or_default().to_string() });
        }
    }
    found
}

/// Anchors of a document's headings, as its readers make them: letters, digits, `-` and `_` stay, blanks become `-`,
/// and a second heading of a name gets a number.
fn headings(text: &str) -> BTreeSet<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = |c: char| (c.is_alphanumeric() || c == '-' || c == '_').then_some(c);
        let anchor: String =
            title.trim().to_lowercase().chars().filter_map(|c| if c == ' ' { Some('-') } else { kept(c) }).collect();
        let count = counts.entry(anchor.clone()).or_default();
        anchors.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_code() {
        let text = "a [b](c.md#d) `[no](x)` ![e](f.png)\n```\n[no](y)\n```\n[g\nh](https://i)\n[j]: k.md\n";
        let found: Vec<_> = links(text).into_iter().map(|l| (l.line, l.target)).collect();
        let expected = [(1, "c.md#d"), (1, "f.png"), (6, "https://i"), (7, "k.md")];
        assert_eq!(found, expected.map(|(line, target)| (line, target.to_string())));
    }

    #[test]
    fn paths_are_found_in_backticks() {
        let text = "`src/a.rs` src/b.rs `src/c/` `src/d::e` `src/*.rs` `src/{f,g}.rs` `a.rs`\n```\n`src/h.rs`\n```\n\
                    `cargo test src/i.rs` [`build/j.rs`](k) `docs/l` `tests/m-n_1.tar.gz`\n";
        let found: Vec<_> = named_paths(text).into_iter().map(|l| (l.line, l.target)).collect();
        let expected = [(1, "src/a.rs"), (1, "src/c/"), (5, "build/j.rs"), (5, "docs/l"), (5, "tests/m-n_1.tar.gz")];
        assert_eq!(found, expected.map(|(line, target)| (line, target.to_string())));
    }

    #[test]
    fn documents_that_name_todays_paths() {
        let named = [
            "README.md",
            "docs/layer.md",
            "kernels/NOTES.md",
            "kernels/notes/grouped_gemm.md",
            "benches/results/README.md",
            "models/README.md",
            "models/small/README.md",
        ];
        assert!(named.iter().all(|document| names_paths(Path::new(document))));
        let others =
            ["CHANGELOG.md", "docs/former-names.md", "tests/golden/README.md", "benches/results/2026-11-22.md"];
        assert!(!others.iter().any(|document| names_paths(Path::new(document))));
    }

    #[test]
    fn a_name_without_an_extension_is_a_folder_or_a_rust_file() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(["src/links", "src/links.rs", "src", "src/"].into_iter().all(|name| is_path_of(root, name)));
        assert!(!["src/nothing", "src/nothing.rs", "src/links/"].into_iter().any(|name| is_path_of(root, name)));
    }

    #[test]
    fn anchors_are_those_of_headings() {
        let found = headings("# A `b`, c\n```sh\n# no\n```\n## Same\n## Same\n#no\n### 1×16: \"x\"\n");
        let expected = ["a-b-c", "same", "same-1", "116-x"].map(String::from);
        assert_eq!(found, expected.into_iter().collect());
    }

    #[test]
    fn what_leads_nowhere_is_said() {
        let folder = std::env::temp_dir().join(format!("moebius-links-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let document = folder.join("a.md");
        std::fs::write(&document, "# One\n").expect("a file");
        std::fs::write(folder.join("b.rs"), "").expect("a file");
        let of = |target: &str| check(&document, target, &mut BTreeMap::new()).expect("a readable file");
        for good in ["#one", "a.md#one", "b.rs", "https://elsewhere/x", "../"] {
            assert_eq!(of(good), None, "{good}");
        }
        for (bad, problem) in [
            ("c.md", "no such file"),
            ("#two", "no such heading"),
            ("a.md#two", "no such heading"),
            ("b.rs#one", "only documents have anchors"),
        ] {
            assert_eq!(of(bad).as_deref(), Some(problem), "{bad}");
        }
        std::fs::remove_dir_all(&folder).expect("the folder's end");
    }
}
