//! The guide: `docs/` as a book, by mdBook.

use std::path::{Path, PathBuf};
use std::process::Command;

pub(super) fn run(arguments: &[String]) -> Result<String, String> {
    if let Some(unknown) = arguments.first() {
        return Err(format!("guide: {unknown}: no argument is taken"));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("the repository's folder is not to be found")?;
    let status = Command::new("mdbook").arg("build").arg(root.join("docs")).status();
    match status.map_err(|e| format!("mdbook (cargo install mdbook): {e}"))? {
        status if status.success() => {}
        status => return Err(format!("mdbook: {status}")),
    }
    let book = root.join("target/book");
    let mut pages = Vec::new();
    let failed = |e| format!("{}: {e}", book.display());
    for entry in std::fs::read_dir(&book).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|e| e == "html") {
            pages.push(path);
        }
    }
    for page in &pages {
        let text = std::fs::read_to_string(page).map_err(|e| format!("{}: {e}", page.display()))?;
        let text = outward(&text, &|path| root.join("docs").join(path).exists());
        std::fs::write(page, text).map_err(|e| format!("{}: {e}", page.display()))?;
    }
    let index: PathBuf = book.join("index.html");
    Ok(format!("{}: {} pages", index.display(), pages.len()))
}

/// A page whose links out of the book lead to the repository's own files, which lie one folder further up from the
/// built pages than from their sources. mdBook has made `.html` of each `.md`.
fn outward(page: &str, exists: &dyn Fn(&str) -> bool) -> String {
    const LINK: &str = "href=\"../";
    let mut parts = page.split(LINK);
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let end = part.find(['"', '#']).unwrap_or(part.len());
        let (path, rest) = part.split_at(end);
        let source = path.strip_suffix(".html").map(|stem| format!("{stem}.md"));
        let file = source.filter(|source| exists(&format!("../{source}"))).unwrap_or_else(|| path.to_string());
        out.push_str(&format!("{LINK}../{file}{rest}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_out_of_the_book_lead_to_sources() {
        let page = r#"<a href="a.html">a</a> <a href="../kernels/NOTES.html#x">n</a> <a href="../src/lib.rs">l</a>"#;
        let expected =
            r#"<a href="a.html">a</a> <a href="../../kernels/NOTES.md#x">n</a> <a href="../../src/lib.rs">l</a>"#;
        assert_eq!(outward(page, &|path| path == "../kernels/NOTES.md"), expected);
    }
}
