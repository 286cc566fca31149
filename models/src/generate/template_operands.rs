//! The engine's operators that write a value as text before they count it: `~` on both sides, and `in` on its left. A
//! template's source is read for them, and each such operand is put through a filter that counts first: `a ~ b` becomes
//! `(a)|counted ~ (b)|counted`, which means the same. Lines stay where they are.

use std::ops::Range;

use minijinja::{Environment, Error, State, Value};

use super::python_budget::{Budget, shown};

/// Brackets in brackets, at most. The engine takes fewer.
const DEEPEST: i64 = 500;

/// The filter's name, which no template has by chance.
const COUNTED: &str = "moebius_counted";

/// The filter that counts: gives the value, where the steps pay for its text.
fn counted(state: &State, value: &Value) -> Result<Value, Error> {
    if value.as_object().is_some() {
        shown(value, Budget::of(state))?;
    }
    Ok(value.clone())
}

/// Adds the filter to an environment.
pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_filter(COUNTED, counted);
}

/// A template whose operands count before they are written. An operand that cannot be found is an error: what it says.
pub(super) fn with_counted_operands(source: &str) -> Result<String, String> {
    let mut operands = Vec::new();
    let mut at = 0;
    while let Some(open) = source[at..].find('{').map(|found| at + found) {
        let rest = &source[open..];
        at = if let Some(comment) = rest.strip_prefix("{#") {
            // `{#}` begins a comment and does not end it.
            comment.find("#}").map_or(source.len(), |end| open + end + 4)
        } else if let Some(end) = raw_block(rest) {
            open + end
        } else if rest.starts_with("{{") || rest.starts_with("{%") {
            let tag = Tag::read(source, open);
            tag.find_operands(source, &mut operands)?;
            tag.end
        } else {
            open + 1
        };
    }
    // What stands between two operators is an operand of both.
    operands.sort_unstable_by_key(|operand| (operand.start, operand.end));
    operands.dedup();
    Ok(wrapped(source, &operands))
}

/// The source with these parts in parentheses and through the filter.
fn wrapped(source: &str, operands: &[Range<usize>]) -> String {
    let mut marks: Vec<(usize, bool)> = operands.iter().flat_map(|o| [(o.start, true), (o.end, false)]).collect();
    // Where one operand ends and another begins there is an operator between.
    marks.sort_unstable();
    let (mut out, mut at) = (String::with_capacity(source.len() + 24 * operands.len()), 0);
    for (mark, is_start) in marks {
        out.push_str(&source[at..mark]);
        match is_start {
            true => out.push('('),
            false => out.push_str(&format!(")|{COUNTED}")),
        }
        at = mark;
    }
    out.push_str(&source[at..]);
    out
}

/// Bytes of a block of raw text, up to the end of its last tag; `None` where none begins.
fn raw_block(text: &str) -> Option<usize> {
    let tag = |text: &str, name: &str| -> Option<usize> {
        let inner = text.strip_prefix("{%")?;
        let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_ascii_start().strip_prefix(name)?;
        let inner = inner.trim_ascii_start();
        let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).strip_prefix("%}")?;
        Some(text.len() - inner.len())
    };
    let mut at = tag(text, "raw")?;
    while let Some(open) = text[at..].find("{%").map(|found| at + found) {
        if let Some(end) = tag(&text[open..], "endraw") {
            return Some(open + end);
        }
        at = open + 2;
    }
    Some(text.len())
}

/// What a token is to its neighbors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Name,
    /// A number or a text.
    Literal,
    Open,
    Close,
    Operator,
}

struct Token {
    kind: TokenKind,
    place: Range<usize>,
}

/// A tag's tokens.
struct Tag {
    tokens: Vec<Token>,
    is_block: bool,
    /// Behind its last byte.
    end: usize,
}

impl Tag {
    /// Reads the tag that begins at `open`, as the engine's lexer does.
    fn read(source: &str, open: usize) -> Self {
        let is_block = source[open..].starts_with("{%");
        let close = if is_block { "%}" } else { "}}" };
        let (mut tokens, mut depth, mut at) = (Vec::new(), 0i64, open + 2);
        if source[at..].starts_with(['-', '+']) {
            at += 1;
        }
        while let Some(first) = source[at..].chars().next() {
            let rest = &source[at..];
            if first.is_ascii_whitespace() {
                at += 1;
                continue;
            }
            let marked = rest.strip_prefix(['-', '+']).unwrap_or(rest);
            if depth == 0 && marked.starts_with(close) {
                return Self { tokens, is_block, end: source.len() - marked.len() + 2 };
            }
            let after_dot = source[..at].ends_with('.');
            let (kind, length) = match first {
                '(' | '[' | '{' => (TokenKind::Open, 1),
                ')' | ']' | '}' => (TokenKind::Close, 1),
                '\'' | '"' => (TokenKind::Literal, text_length(rest)),
                _ if first.is_ascii_digit() => (TokenKind::Literal, number_length(rest, after_dot)),
                _ if is_of_name(first) => (TokenKind::Name, rest.find(|c| !is_of_name(c)).unwrap_or(rest.len())),
                _ if ["//", "**", "==", "!=", ">=", "<="].iter().any(|two| rest.starts_with(two)) => {
                    (TokenKind::Operator, 2)
                }
                _ => (TokenKind::Operator, first.len_utf8()),
            };
            depth += i64::from(kind == TokenKind::Open) - i64::from(kind == TokenKind::Close);
            tokens.push(Token { kind, place: at..at + length });
            at += length;
        }
        // The engine does not take a tag without an end.
        Self { tokens, is_block, end: source.len() }
    }

    fn text<'s>(&self, source: &'s str, token: usize) -> &'s str {
        self.tokens.get(token).map_or("", |token| &source[token.place.clone()])
    }

    /// A name that stands for itself: no attribute, and no filter's or test's name.
    fn word<'s>(&self, source: &'s str, token: usize) -> &'s str {
        let before = |back: usize| token.checked_sub(back).map_or("", |at| self.text(source, at));
        let is_test =
            self.is_test_operator(source, 1, token) || before(1) == "not" && self.is_test_operator(source, 2, token);
        match self.tokens.get(token).is_some_and(|token| token.kind == TokenKind::Name) {
            true if !is_test && ![".", "|"].contains(&before(1)) => self.text(source, token),
            _ => "",
        }
    }

    /// Whether the token that lies so many before this one is the operator `is`, and no attribute, filter or variable of that
    /// name.
    fn is_test_operator(&self, source: &str, back: usize, token: usize) -> bool {
        let Some(at) = token.checked_sub(back).filter(|at| self.text(source, *at) == "is") else { return false };
        let words = ["and", "or", "not", "if", "elif", "else", "in", "is", "set", "for"];
        at.checked_sub(1).is_some_and(|before| match self.tokens[before].kind {
            TokenKind::Name => !words.contains(&self.text(source, before)),
            TokenKind::Literal | TokenKind::Close => true,
            TokenKind::Open | TokenKind::Operator => false,
        })
    }

    fn find_operands(&self, source: &str, operands: &mut Vec<Range<usize>>) -> Result<(), String> {
        let mut is_loop = self.is_block && self.text(source, 0) == "for";
        let mut depth = 0i64;
        for token in 0..self.tokens.len() {
            match self.tokens[token].kind {
                // The operators of each bracket are looked for through all that it holds.
                TokenKind::Open if depth >= DEEPEST => {
                    return Err(format!("expected at most {DEEPEST} brackets in one another, found more"));
                }
                TokenKind::Open => depth += 1,
                TokenKind::Close => depth -= 1,
                TokenKind::Operator if self.text(source, token) == "~" => {
                    operands.push(self.operand(source, self.left(source, token), token)?);
                    operands.push(self.operand(source, token + 1, self.right(source, token + 1))?);
                }
                // That of `for item in items` is no operator.
                TokenKind::Name if self.word(source, token) == "in" && is_loop && depth == 0 => is_loop = false,
                TokenKind::Name if self.word(source, token) == "in" => {
                    let is_negated = token > 0 && self.word(source, token - 1) == "not";
                    let operator = token - usize::from(is_negated);
                    operands.push(self.operand(source, self.left_of_in(source, operator), operator)?);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The part of the source that these tokens are.
    fn operand(&self, source: &str, first: usize, end: usize) -> Result<Range<usize>, String> {
        match self.tokens.get(first..end) {
            Some([first, .., last]) => Ok(first.place.start..last.place.end),
            Some([one]) => Ok(one.place.clone()),
            _ => {
                let at = self.tokens.get(end.min(self.tokens.len().saturating_sub(1))).map_or(0, |t| t.place.start);
                Err(format!("line {}: an operator without an operand", source[..at].matches('\n').count() + 1))
            }
        }
    }

    /// The first token of what stands before the operator `~`.
    fn left(&self, source: &str, operator: usize) -> usize {
        self.behind_stars(source, operator, self.begin(operator, |token| self.ends_concatenation(source, token)))
    }

    /// The first token of what stands before the operator `in`.
    fn left_of_in(&self, source: &str, operator: usize) -> usize {
        self.behind_stars(source, operator, self.begin(operator, |token| self.ends_comparison(source, token)))
    }

    /// The first token but for a star that has a call take a list or a dictionary apart.
    fn behind_stars(&self, source: &str, operator: usize, first: usize) -> usize {
        first + usize::from(first < operator && ["*", "**"].contains(&self.text(source, first)))
    }

    fn begin(&self, operator: usize, ends: impl Fn(usize) -> bool) -> usize {
        let (mut depth, mut first) = (0usize, operator);
        // A block's first word says what it is.
        let least = usize::from(self.is_block);
        while first > least {
            let token = first - 1;
            match self.tokens[token].kind {
                TokenKind::Close => depth += 1,
                TokenKind::Open if depth == 0 => break,
                TokenKind::Open => depth -= 1,
                _ if depth == 0 && ends(token) => break,
                _ => {}
            }
            first = token;
        }
        first
    }

    /// Behind the last token of what stands behind the operator `~`.
    fn right(&self, source: &str, first: usize) -> usize {
        let (mut depth, mut end) = (0usize, first);
        while let Some(token) = self.tokens.get(end) {
            match token.kind {
                TokenKind::Open => depth += 1,
                TokenKind::Close if depth == 0 => break,
                TokenKind::Close => depth -= 1,
                _ if depth == 0 && self.ends_concatenation(source, end) => break,
                _ => {}
            }
            end += 1;
        }
        end
    }

    /// Whether an operand of a comparison ends at this token: it binds less.
    fn ends_comparison(&self, source: &str, token: usize) -> bool {
        let words = ["and", "or", "not", "if", "else", "in"];
        // A name elsewhere.
        let ends_loop = self.is_block && self.text(source, 0) == "for" && self.word(source, token) == "recursive";
        let operators = [",", ":", "=", "==", "!=", "<", "<=", ">", ">="];
        match self.tokens[token].kind {
            TokenKind::Name => ends_loop || words.contains(&self.word(source, token)),
            TokenKind::Operator => operators.contains(&self.text(source, token)),
            _ => false,
        }
    }

    /// Whether an operand of `~` does.
    fn ends_concatenation(&self, source: &str, token: usize) -> bool {
        let is_sum =
            self.tokens[token].kind == TokenKind::Operator && ["+", "-", "~"].contains(&self.text(source, token));
        self.ends_comparison(source, token) || is_sum && self.is_behind_operand(source, token)
    }

    /// Whether a `-` takes from what stands before it, or else is a sign.
    fn is_behind_operand(&self, source: &str, token: usize) -> bool {
        let Some(before) = token.checked_sub(1) else { return false };
        match self.tokens[before].kind {
            TokenKind::Name => {
                !["and", "or", "not", "if", "elif", "else", "in", "is"].contains(&self.word(source, before))
            }
            TokenKind::Literal | TokenKind::Close => true,
            TokenKind::Open | TokenKind::Operator => false,
        }
    }
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || !c.is_ascii()
}

/// Bytes of the text in quotes that begins here.
fn text_length(rest: &str) -> usize {
    let mut chars = rest.char_indices();
    let quote = chars.next().map(|(_, quote)| quote);
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => _ = chars.next(),
            _ if Some(c) == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Bytes of the number that begins here. Behind a dot it is an index, without a fraction.
fn number_length(rest: &str, after_dot: bool) -> usize {
    let bytes = rest.as_bytes();
    if let [b'0', b'x' | b'X' | b'o' | b'O' | b'b' | b'B', ..] = bytes {
        return 2 + bytes[2..].iter().take_while(|b| b.is_ascii_hexdigit() || **b == b'_').count();
    }
    let digits = |at: usize| bytes[at..].iter().take_while(|b| b.is_ascii_digit() || **b == b'_').count();
    let exponent = |at: usize| match bytes.get(at..).unwrap_or_default() {
        [b'e' | b'E', b'0'..=b'9', ..] => 1 + digits(at + 1),
        [b'e' | b'E', b'+' | b'-', ..] => 2 + digits(at + 2),
        _ => 0,
    };
    let mut at = digits(0);
    let name_follows = || rest[at + 1..].starts_with(|c: char| is_of_name(c) && !c.is_ascii_digit());
    if !after_dot && bytes.get(at) == Some(&b'.') && (exponent(at + 1) > 0 || !name_follows()) {
        at += 1;
        at += digits(at);
    }
    at + exponent(at)
}

#[cfg(test)]
#[path = "template_operands_tests.rs"]
mod tests;
