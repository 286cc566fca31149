//! The guide's pieces of programs: each stands here too, so that it compiles as it is shown. Lines with an ellipsis are
//! the reader's to fill.
#![allow(
    dead_code,
    unused_variables,
    unused_mut,
    unused_imports,
    unused_assignments,
    clippy::redundant_closure,
    reason = "shown, not run"
)]

#[rustfmt::skip]
mod checkpoints;
#[rustfmt::skip]
mod etp;
#[cfg(feature = "nccl")]
#[rustfmt::skip]
mod nccl;
#[rustfmt::skip]
mod nccl_ep;
#[cfg(feature = "cuda")]
#[rustfmt::skip]
mod one_gpu;
#[rustfmt::skip]
mod quantization;
#[rustfmt::skip]
mod training;

use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Pieces of a page of the guide that are no tests of their own, in order, each a list of lines.
fn pieces(page: &'static str) -> Vec<Vec<&'static str>> {
    let (mut all, mut piece): (Vec<Vec<&str>>, Option<Vec<&str>>) = (Vec::new(), None);
    for line in page.lines().map(str::trim) {
        match (&mut piece, line) {
            (None, "```rust,ignore") => piece = Some(Vec::new()),
            (Some(_), "```") => all.extend(piece.take()),
            (Some(lines), line) if !line.is_empty() && !line.contains('…') => lines.push(line),
            _ => {}
        }
    }
    all
}

#[test]
fn every_piece_of_the_guide_compiles() {
    let files = [
        include_str!("training.rs"),
        include_str!("checkpoints.rs"),
        include_str!("quantization.rs"),
        include_str!("etp.rs"),
        include_str!("one_gpu.rs"),
        include_str!("nccl.rs"),
        include_str!("nccl_ep.rs"),
    ];
    let own: Vec<&str> = files.into_iter().flat_map(str::lines).map(str::trim).collect();
    let pages = [
        ("checkpoints", include_str!("../../docs/checkpoints.md")),
        ("etp", include_str!("../../docs/etp.md")),
        ("invariance", include_str!("../../docs/invariance.md")),
        ("nccl", include_str!("../../docs/nccl.md")),
        ("nccl-ep", include_str!("../../docs/nccl-ep.md")),
        ("one-gpu", include_str!("../../docs/one-gpu.md")),
        ("quantization", include_str!("../../docs/quantization.md")),
        ("training", include_str!("../../docs/training.md")),
    ];
    let mut found = 0;
    for (name, page) in pages {
        for piece in pieces(page) {
            let begins = (0..own.len()).filter(|at| own[*at] == piece[0]);
            let whole = |at: usize| {
                let mut lines = own[at..].iter();
                piece.iter().all(|line| lines.find(|own| !own.is_empty() && !own.contains('…')) == Some(line))
            };
            assert!(begins.into_iter().any(whole), "{name}.md: not in tests/guide/:\n{}", piece.join("\n"));
            found += 1;
        }
    }
    assert!(found >= 16, "{found} pieces");
}
