//! Follows one token of a two-rank run from `forward` to its experts and back: prints every number on its way, and
//! draws them. `docs/layer.md` explains the run; its text and its picture are this program's output.
//!
//! ```text
//! cargo run --release --example one_token -- docs/images/one-token.svg
//! ```

mod draw;
#[path = "../support/output.rs"]
mod output;
mod run;

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use output::{conclude, say};
use run::{FOLLOWED, RANKS, TokenId, Trace};

/// Follows one token of a two-rank run, and prints every number on its way.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// File for the picture, in SVG.
    picture: Option<PathBuf>,
}

fn main() -> ExitCode {
    conclude(follow(&Arguments::parse()).map(|()| true))
}

fn follow(arguments: &Arguments) -> Result<(), Box<dyn Error + Send + Sync>> {
    let traces = run::run()?;
    say(report(&traces).trim_end());
    if let Some(path) = &arguments.picture {
        std::fs::write(path, draw::draw(&traces)).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// A number in at most three decimals.
fn number(v: f32) -> String {
    let text = format!("{v:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

fn numbers(row: &[f32]) -> String {
    format!("({})", row.iter().map(|v| number(*v)).collect::<Vec<_>>().join(", "))
}

fn name(id: TokenId) -> String {
    format!("rank {} token {}", id.rank, id.token)
}

/// The stages of the run, the followed token's lines marked with `>`.
fn report(traces: &[Trace]) -> String {
    let mut out = String::new();
    let mark = |followed: bool| if followed { '>' } else { ' ' };
    let mut section = |title: &str, lines: Vec<(bool, String)>| {
        let _ = writeln!(out, "{title}");
        for (followed, line) in lines {
            let _ = writeln!(out, "{} {line}", mark(followed));
        }
    };
    let tokens: Vec<TokenId> =
        (0..RANKS).flat_map(|rank| (0..traces[rank].tokens.len()).map(move |token| TokenId { rank, token })).collect();
    let each_token = |line: &dyn Fn(&Trace, usize) -> String| -> Vec<(bool, String)> {
        let line = |id: &TokenId| (*id == FOLLOWED, format!("{}: {}", name(*id), line(&traces[id.rank], id.token)));
        tokens.iter().map(line).collect()
    };
    let each_slot = |line: &dyn Fn(&run::Slot) -> String| -> Vec<(bool, String)> {
        let of_rank = |rank: usize| {
            let slots = traces[rank].slots.iter().enumerate();
            slots.map(move |(s, slot)| (slot.from == FOLLOWED, format!("rank {rank} slot {s}: {}", line(slot))))
        };
        (0..RANKS).flat_map(of_rank).collect()
    };
    section(
        "tokens and router",
        each_token(&|t, i| {
            let (x, l) = (numbers(&t.tokens[i]), numbers(&t.logits[i]));
            format!("x {x}, logits {l}, ids {:?}, weights {}", t.ids[i], numbers(&t.weights[i]))
        }),
    );
    let arrived = |rank: usize| {
        let rows = traces[rank].received.iter().enumerate();
        rows.map(move |(r, id)| (*id == FOLLOWED, format!("rank {rank} received row {r}: {}", name(*id))))
    };
    section("dispatch", (0..RANKS).flat_map(arrived).collect());
    section(
        "slots and experts",
        each_slot(&|s| {
            let (from, w, out) = (name(s.from), number(s.weight), numbers(&s.output));
            format!("expert {}, received row {} ({from}), weight {w}, output {out}", s.expert, s.received_row)
        }),
    );
    section("combine", each_token(&|t, i| format!("y {}", numbers(&t.y[i]))));
    section(
        "backward: experts",
        each_slot(&|s| format!("gradient of the row {}, of the weight {}", numbers(&s.d_row), number(s.d_weight))),
    );
    section(
        "backward: at the token's rank",
        each_token(&|t, i| {
            let (weights, logits) = (numbers(&t.d_weights[i]), numbers(&t.d_logits[i]));
            let (tokens, x) = (numbers(&t.d_tokens[i]), numbers(&t.d_x[i]));
            format!("from the experts {tokens}, of the weights {weights}, of the logits {logits}, of x {x}")
        }),
    );
    let load: Vec<_> = (0..RANKS).map(|rank| (false, format!("rank {rank}: {:?}", traces[rank].load))).collect();
    section("load of the experts, as each rank knows it", load);
    out
}
