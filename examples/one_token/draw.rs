//! The run as a picture.

use std::fmt::Write;

use super::run::{FOLLOWED, LOCAL, RANKS, TokenId, Trace};
use super::{number, numbers};

const WIDTH: f64 = 1180.0;
const HEIGHT: f64 = 580.0;
/// Width of the stages' labels, left of the ranks.
const LABELS: f64 = 110.0;
const COLUMN: f64 = (WIDTH - LABELS) / RANKS as f64;
const MARGIN: f64 = 24.0;
const BOX_HEIGHT: f64 = 44.0;
/// Tops of the four rows of boxes.
const TOKENS_AT: f64 = 60.0;
const RECEIVED_AT: f64 = 200.0;
const SLOTS_AT: f64 = 350.0;
const OUTPUTS_AT: f64 = 512.0;
const FOLLOWED_COLOR: &str = "#c0392b";
const OTHER_COLOR: &str = "#9aa5b1";

/// A box on the page: the middle of its upper edge, and its width.
#[derive(Clone, Copy)]
struct Place {
    x: f64,
    y: f64,
    width: f64,
}

impl Place {
    /// Of entry `i` among `n` of a rank.
    fn new(rank: usize, i: usize, n: usize, y: f64) -> Self {
        let step = (COLUMN - 2.0 * MARGIN) / n as f64;
        Self { x: LABELS + rank as f64 * COLUMN + MARGIN + step * (i as f64 + 0.5), y, width: step - 8.0 }
    }
}

struct Page(String);

impl Page {
    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.0, "{text}");
    }

    fn text(&mut self, x: f64, y: f64, size: u32, anchor: &str, text: &str) {
        self.line(format_args!(
            r##"<text x="{x:.1}" y="{y:.1}" font-size="{size}" text-anchor="{anchor}" fill="#1f2933">{text}</text>"##
        ));
    }

    fn entry(&mut self, at: Place, followed: bool, lines: [&str; 2]) {
        let (stroke, fill) = if followed { (FOLLOWED_COLOR, "#fdecea") } else { (OTHER_COLOR, "#ffffff") };
        let Place { x, y, width } = at;
        let left = x - width / 2.0;
        self.line(format_args!(
            r#"<rect x="{left:.1}" y="{y:.1}" width="{width:.1}" height="{BOX_HEIGHT}" rx="4" fill="{fill}" stroke="{stroke}"/>"#
        ));
        self.text(x, y + 18.0, 12, "middle", lines[0]);
        self.text(x, y + 35.0, 10, "middle", lines[1]);
    }

    /// From the lower edge of one box to the upper edge of another.
    fn arrow(&mut self, from: Place, to: Place, followed: bool) {
        let (color, width) = if followed { (FOLLOWED_COLOR, 2.2) } else { (OTHER_COLOR, 1.0) };
        let (y1, y2) = (from.y + BOX_HEIGHT, to.y - 2.0);
        let middle = (y1 + y2) / 2.0;
        let marker = if followed { "followed" } else { "other" };
        self.line(format_args!(
            r#"<path d="M {:.1} {y1:.1} C {:.1} {middle:.1}, {:.1} {middle:.1}, {:.1} {y2:.1}" fill="none" stroke="{color}" stroke-width="{width}" marker-end="url(#{marker})"/>"#,
            from.x, from.x, to.x, to.x
        ));
    }
}

/// The picture as an SVG document.
pub fn draw(traces: &[Trace]) -> String {
    let mut page = Page(String::new());
    page.line(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="DejaVu Sans, Verdana, sans-serif">"#
    ));
    page.line(format_args!(r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#f5f7fa"/>"##));
    for (name, color) in [("followed", FOLLOWED_COLOR), ("other", OTHER_COLOR)] {
        page.line(format_args!(
            r#"<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{color}"/></marker>"#
        ));
    }
    let border = LABELS + COLUMN;
    page.line(format_args!(
        r##"<line x1="{border}" y1="16" x2="{border}" y2="{:.1}" stroke="#cbd2d9" stroke-dasharray="6 5"/>"##,
        HEIGHT - 16.0
    ));
    for rank in 0..RANKS {
        let first = rank * LOCAL;
        let title = format!("rank {rank}: experts {first} and {}", first + LOCAL - 1);
        page.text(LABELS + (rank as f64 + 0.5) * COLUMN, 34.0, 16, "middle", &title);
    }
    let stages = [
        (TOKENS_AT, ["tokens", "expert: weight"]),
        (RECEIVED_AT, ["received rows", "their tokens"]),
        (SLOTS_AT, ["slots", "expert, weight"]),
        (OUTPUTS_AT, ["outputs", "sums of slots"]),
    ];
    for (y, [title, below]) in stages {
        page.text(14.0, y + 18.0, 13, "start", title);
        page.text(14.0, y + 35.0, 10, "start", below);
    }

    let token_at = |id: TokenId, y: f64| Place::new(id.rank, id.token, traces[id.rank].tokens.len(), y);
    for (rank, trace) in traces.iter().enumerate() {
        let received_at = |row: usize| Place::new(rank, row, trace.received.len(), RECEIVED_AT);
        let slot_at = |slot: usize| Place::new(rank, slot, trace.slots.len(), SLOTS_AT);
        for (row, id) in trace.received.iter().enumerate() {
            page.arrow(token_at(*id, TOKENS_AT), received_at(row), *id == FOLLOWED);
        }
        for (s, slot) in trace.slots.iter().enumerate() {
            page.arrow(received_at(slot.received_row), slot_at(s), slot.from == FOLLOWED);
            page.arrow(slot_at(s), token_at(slot.from, OUTPUTS_AT), slot.from == FOLLOWED);
        }
    }
    for (rank, trace) in traces.iter().enumerate() {
        for token in 0..trace.tokens.len() {
            let id = TokenId { rank, token };
            let ids: Vec<_> = trace.ids[token].iter().zip(&trace.weights[token]).collect();
            let ids: Vec<_> = ids.iter().map(|(e, w)| format!("{e}: {}", number(**w))).collect();
            let (top, bottom) = (format!("token {token}"), ids.join(", "));
            page.entry(token_at(id, TOKENS_AT), id == FOLLOWED, [&top, &bottom]);
            page.entry(
                token_at(id, OUTPUTS_AT),
                id == FOLLOWED,
                [&format!("y of token {token}"), &numbers(&trace.y[token])],
            );
        }
        for (row, id) in trace.received.iter().enumerate() {
            let of = format!("rank {} token {}", id.rank, id.token);
            let at = Place::new(rank, row, trace.received.len(), RECEIVED_AT);
            page.entry(at, *id == FOLLOWED, [&format!("row {row}"), &of]);
        }
        for (s, slot) in trace.slots.iter().enumerate() {
            let at = Place::new(rank, s, trace.slots.len(), SLOTS_AT);
            let of = format!("expert {}, {}", slot.expert, number(slot.weight));
            page.entry(at, slot.from == FOLLOWED, [&format!("slot {s}"), &of]);
        }
    }
    page.line(format_args!("</svg>"));
    page.0
}
