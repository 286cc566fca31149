//! Text of others in messages: names of tensors and files, values of a configuration.

use std::fmt::Write;

/// Most characters of one such text; tensors' names, paths and lists of what is expected are shorter.
const MAX_CHARS: usize = 400;
/// How many of a longer one's last characters are shown.
const TAIL: usize = 40;

/// The value that was found, where it is known.
pub(super) fn found(value: &Option<i64>) -> String {
    value.map_or("another (seen by a kernel)".to_string(), |value| value.to_string())
}

/// An expert's id: of a negative one also what it is where ids are U32, whose bits travel as an I32.
pub(super) fn id(id: i64) -> String {
    match i32::try_from(id) {
        Ok(bits) if bits < -1 => format!("{id} ({} as U32)", bits.cast_unsigned()),
        _ => id.to_string(),
    }
}

/// Slots that were found, where they are known.
pub(super) fn slots(first_and_count: &Option<(i64, i64)>) -> String {
    let known = first_and_count.map(|(first, count)| format!("{count} slots from {first}"));
    known.unwrap_or("others (seen by a kernel)".to_string())
}

/// A text for a terminal or a log: what would steer a terminal or change the order of what is read is escaped, and what
/// is too long is shortened in its middle.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(2 * MAX_CHARS));
    if text.chars().nth(MAX_CHARS).is_none() {
        escape(text, &mut out);
        return out;
    }
    let end = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    let tail = text.char_indices().rev().nth(TAIL - 1).map_or(0, |(at, _)| at);
    escape(&text[..end(MAX_CHARS - 2 * TAIL)], &mut out);
    let _ = write!(out, "…[{} bytes]…", text.len());
    escape(&text[tail..], &mut out);
    out
}

/// A text of several lines for a terminal, of any length, such as a program's last words: as [`printable`], but line ends
/// stay.
pub fn printable_lines(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (i, line) in text.split('\n').enumerate() {
        out.extend((i > 0).then_some('\n'));
        escape(line, &mut out);
    }
    out
}

fn escape(text: &str, out: &mut String) {
    for c in text.chars() {
        // Marks that change the direction of text, invisible characters, and what ends a line.
        let unseen = matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
        match c.is_control() || unseen {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{id, printable, printable_lines};

    #[test]
    fn another_ranks_text_steers_no_terminal() {
        let reason = "\u{1b}[31m".to_string();
        let error = crate::Error::Peer { call: "combine", rank: 0, peer: 1, reason };
        assert_eq!(error.to_string(), "combine on rank 0: rank 1 failed: \\u{1b}[31m");
    }

    #[test]
    fn an_id_is_shown_as_either_type() {
        assert_eq!([-1, 7, 1 << 40].map(id), ["-1", "7", "1099511627776"]);
        assert_eq!(id(-5), "-5 (4294967291 as U32)");
    }

    #[test]
    fn terminals_are_not_steered_and_logs_not_filled() {
        assert_eq!(printable("model.layers.3.mlp.gate.weight"), "model.layers.3.mlp.gate.weight");
        assert_eq!(printable("grün 層 \\ \"x\""), "grün 層 \\ \"x\"");
        assert_eq!(printable("a\u{1b}[31m\r\n\u{202e}b\u{9b}0m"), "a\\u{1b}[31m\\r\\n\\u{202e}b\\u{9b}0m");
        let long = printable(&format!("start{}end", "é".repeat(1 << 20)));
        assert!(long.starts_with("starté") && long.ends_with("éend") && long.contains("…[2097160 bytes]…"));
        assert!(long.chars().count() < 400, "{}", long.chars().count());
        let lines = "error:\n  a\u{1b}]0;t\u{7}\r\n\n\u{2028}";
        assert_eq!(printable_lines(lines), "error:\n  a\\u{1b}]0;t\\u{7}\\r\n\n\\u{2028}");
        let once = printable_lines(lines);
        assert_eq!(printable_lines(&once), once, "what is escaped stays as it is");
        // Escapes take at most 10 characters for one.
        assert!(printable(&"\u{1b}".repeat(1 << 20)).len() < 4000);
    }
}
