//! The guide's page about a family shows code of the tree: every piece of it stands in the family's file or in the list.

use std::error::Error;
use std::path::Path;

/// Lines of the pieces of Rust on a page, without their margins.
fn pieces(page: &str) -> Vec<Vec<&str>> {
    let (mut all, mut piece): (Vec<Vec<&str>>, Option<Vec<&str>>) = (Vec::new(), None);
    for line in page.lines().map(str::trim) {
        match (&mut piece, line) {
            (None, "```rust,ignore") => piece = Some(Vec::new()),
            (Some(_), "```") => all.extend(piece.take()),
            (Some(lines), line) => lines.push(line),
            (None, _) => {}
        }
    }
    all
}

#[test]
fn every_piece_stands_in_the_tree() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path));
    let sources = [read("src/family/minimax_m2.rs")?, read("src/family/mod.rs")?];
    let sources: Vec<Vec<&str>> = sources.iter().map(|source| source.lines().map(str::trim).collect()).collect();
    let page = read("../docs/add-a-family.md")?;
    let pieces = pieces(&page);
    for piece in &pieces {
        let stands = |source: &Vec<&str>| source.windows(piece.len()).any(|lines| lines == &piece[..]);
        assert!(sources.iter().any(stands), "not in the family's file, nor in the list:\n{}", piece.join("\n"));
    }
    assert_eq!(pieces.len(), 4, "pieces");
    Ok(())
}
