//! The prose of documents: sentences without headings, tables, code blocks and figures, a paragraph a line.

use std::collections::HashSet;
use std::path::Path;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// Paragraphs of Markdown, or of a Rust file's documentation comments, that no document had before.
pub fn paragraphs(path: &Path, text: &str, seen: &mut HashSet<String>) -> Vec<String> {
    let comments;
    let markdown = match path.extension().is_some_and(|extension| extension == "rs") {
        true => {
            comments = documentation(text);
            &comments
        }
        false => text,
    };
    let mut paragraphs = read(markdown);
    paragraphs.retain(|paragraph| is_prose(paragraph) && seen.insert(paragraph.clone()));
    paragraphs
}

/// Documentation comments alone, other lines empty.
fn documentation(text: &str) -> String {
    let line = |line: &str| {
        let line = line.trim_start();
        let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).unwrap_or("");
        format!("{}\n", comment.strip_prefix(' ').unwrap_or(comment))
    };
    text.lines().map(line).collect()
}

/// Text of paragraphs and of list items.
fn read(markdown: &str) -> Vec<String> {
    let (mut paragraphs, mut text, mut outside) = (Vec::new(), String::new(), 0);
    for event in Parser::new_ext(markdown, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::CodeBlock(_) | Tag::Table(_) | Tag::Heading { .. }) => outside += 1,
            Event::End(TagEnd::CodeBlock | TagEnd::Table | TagEnd::Heading(_)) => outside -= 1,
            Event::Start(Tag::Item | Tag::List(_)) | Event::End(TagEnd::Paragraph | TagEnd::Item) => {
                paragraphs.push(std::mem::take(&mut text));
            }
            Event::Text(piece) | Event::Code(piece) if outside == 0 => text.push_str(&piece),
            Event::SoftBreak | Event::HardBreak if outside == 0 => text.push(' '),
            _ => {}
        }
    }
    paragraphs.push(text);
    paragraphs
}

/// Whole sentences in words, and more than a few.
fn is_prose(paragraph: &str) -> bool {
    let letters = paragraph.chars().filter(|c| c.is_ascii_alphabetic() || *c == ' ').count();
    let count = paragraph.chars().count();
    let has_code = ["::", "{", "="].iter().any(|code| paragraph.contains(code));
    paragraph.len() >= 80 && paragraph.ends_with('.') && letters * 100 >= count * 88 && !has_code
}
