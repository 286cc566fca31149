//! Methods of Python's strings, those whose results can be larger than what they are given within a rendering's budget.

use minijinja::value::{Kwargs, Tuple, from_args};
use minijinja::{Error, State, Value};

use crate::generate::python_budget::{BoundedText, Budget, shown};

use super::invalid;

/// Most characters that a method fills a text up to.
const WIDEST: usize = 4096;
/// Most bytes of a number without digits behind its point: those of 1e308, with commas between.
const LONGEST_NUMBER: usize = 512;

/// Methods that Python's strings and dictionaries have, for [`minijinja::Environment::set_unknown_method_callback`].
pub(in crate::generate) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        let budget = Budget::of(state);
        // What a method reads is paid for as well: a quarter of what is written.
        budget.spend(text.len() as u64 / 256)?;
        if let Some(result) = bounded_method(text, name, args, budget) {
            return result;
        }
        if let Some(result) = string_method(text, name, args) {
            return result;
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Methods whose results can be larger than what they are given, however short the template: nothing is made that the
/// rendering's steps do not pay for.
fn bounded_method(text: &str, name: &str, args: &[Value], budget: Budget<'_>) -> Option<Result<Value, Error>> {
    // A piece is a value of some 32 bytes, be it as short as it may.
    let pieces = |count: usize| budget.ensure(count.saturating_mul(32));
    match name {
        "replace" => Some(replace(text, args, budget)),
        "join" => Some(join(text, args, budget)),
        "format" => format_room(text, args, budget).err().map(Err),
        "split" | "rsplit" => {
            // Arguments that are wrong are told where the text is split.
            let (separator, most) = split_args(args).ok()?;
            let ends = match &separator {
                Some(separator) => text.matches(separator.as_str()).count(),
                None => text.split(space).filter(|part| !part.is_empty()).count(),
            };
            pieces(ends.min(most.unwrap_or(usize::MAX)).saturating_add(1)).err().map(Err)
        }
        "splitlines" => pieces(text.matches(ends_line).count().saturating_add(1)).err().map(Err),
        _ => None,
    }
}

/// `replace(old, new, count=-1)`.
pub(in crate::generate) fn replace(text: &str, args: &[Value], budget: Budget<'_>) -> Result<Value, Error> {
    let (old, new, count, kwargs): (&str, &str, Option<i64>, Kwargs) = from_args(args)?;
    let count = count.or(kwargs.get("count")?);
    kwargs.assert_all_used()?;
    let most = count.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    if new.len() > old.len() {
        let found = text.matches(old).take(most).count();
        budget.ensure(found.saturating_mul(new.len() - old.len()).saturating_add(text.len()))?;
    }
    Ok(Value::from(text.replacen(old, new, most)))
}

/// `join(texts)`.
fn join(separator: &str, args: &[Value], budget: Budget<'_>) -> Result<Value, Error> {
    let (values,): (&Value,) = from_args(args)?;
    let mut out = BoundedText::new(budget);
    for (i, value) in values.try_iter()?.checked().enumerate() {
        let value = value?;
        let part = value.as_str().ok_or_else(|| invalid(&format!("join: item {i} is a {}", value.kind())))?;
        if i > 0 {
            out.push(separator)?;
        }
        out.push(part)?;
    }
    Ok(Value::from(out.text))
}

/// Refuses a `format` whose fields are wider than [`WIDEST`], or whose values the steps that are left do not pay for.
fn format_room(text: &str, args: &[Value], budget: Budget<'_>) -> Result<(), Error> {
    let mut longest = 0;
    for value in args {
        longest = longest.max(shown(value, budget)?);
    }
    let mut room = text.len();
    for field in text.replace("{{", "").split('{').skip(1) {
        // A field in a field may be as wide as a value says.
        let Some((field, _)) = field.split_once('}') else { return Err(invalid("format: a field without an end")) };
        let spec = field.split_once(':').map_or("", |(_, spec)| spec);
        let mut widest = 0;
        for digits in spec.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
            let number = digits.parse().ok().filter(|number| *number <= WIDEST);
            let too_wide = || invalid(&format!("format: expected numbers of at most {WIDEST} in a field"));
            widest = widest.max(number.ok_or_else(too_wide)?);
        }
        room = room.saturating_add(longest.max(LONGEST_NUMBER + 4 * widest));
    }
    budget.ensure(room)
}

/// Methods of strings that pycompat lacks, or that do otherwise than Python's.
fn string_method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let result = match name {
        "strip" | "lstrip" | "rstrip" => strip(text, name, args),
        "removeprefix" => from_args(args).map(|(p,): (&str,)| text.strip_prefix(p).unwrap_or(text).into()),
        "removesuffix" => from_args(args).map(|(p,): (&str,)| text.strip_suffix(p).unwrap_or(text).into()),
        "partition" => from_args(args).map(|(p,): (&str,)| parts(text.split_once(p), p, [text, "", ""])),
        "rpartition" => from_args(args).map(|(p,): (&str,)| parts(text.rsplit_once(p), p, ["", "", text])),
        "rsplit" => rsplit(text, args),
        "split" => split(text, args),
        "title" => from_args(args).map(|()| Value::from(title(text))),
        "swapcase" => from_args(args).map(|()| text.chars().map(swapped).collect::<String>().into()),
        "zfill" => from_args(args).map(|(width,): (usize,)| {
            let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
            let sign = &text[..text.len() - digits.len()];
            Value::from(format!("{sign}{}{digits}", "0".repeat(padding(text, width))))
        }),
        "ljust" => pad(text, args, |width| (0, width)),
        "rjust" => pad(text, args, |width| (width, 0)),
        "splitlines" => splitlines(text, args),
        "index" => from_args(args).and_then(|(p,): (&str,)| match text.find(p) {
            Some(at) => Ok(Value::from(text[..at].chars().count())),
            None => Err(invalid("substring not found")),
        }),
        _ => return None,
    };
    Some(result)
}

/// Every letter after what is no letter is upper case, the others lower case.
fn title(text: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match inside {
            false => out.extend(c.to_uppercase()),
            true => out.extend(c.to_lowercase()),
        }
        inside = c.is_alphabetic();
    }
    out
}

fn swapped(c: char) -> String {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

/// Characters that a text lacks of a width, which is bounded.
fn padding(text: &str, width: usize) -> usize {
    width.min(WIDEST).saturating_sub(text.chars().count())
}

fn pad(text: &str, args: &[Value], sides: impl Fn(usize) -> (usize, usize)) -> Result<Value, Error> {
    let (width, fill): (usize, Option<&str>) = from_args(args)?;
    let (before, after) = sides(padding(text, width));
    let fill = fill.unwrap_or(" ");
    if fill.chars().count() != 1 {
        return Err(invalid("fill: expected one character"));
    }
    Ok(Value::from(format!("{}{text}{}", fill.repeat(before), fill.repeat(after))))
}

fn parts(found: Option<(&str, &str)>, separator: &str, otherwise: [&str; 3]) -> Value {
    let parts = found.map_or(otherwise, |(before, after)| [before, separator, after]);
    Value::from(Tuple::from(parts.map(Value::from)))
}

/// Where Python's `str.isspace` is true: beside Unicode's white space, the four separators of information.
fn space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn strip(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let drop = |c: char| chars.map_or_else(|| space(c), |chars| chars.contains(c));
    let text = if name == "rstrip" { text } else { text.trim_start_matches(drop) };
    Ok(Value::from(if name == "lstrip" { text } else { text.trim_end_matches(drop) }))
}

/// `sep` and `maxsplit` by position or by name; a number of splits below zero is none at all.
fn split_args(args: &[Value]) -> Result<(Option<String>, Option<usize>), Error> {
    let (separator, most, kwargs): (Option<Value>, Option<Value>, Kwargs) = from_args(args)?;
    let separator = separator.or(kwargs.get("sep")?).filter(|v| !v.is_none());
    let most: Option<Value> = most.or(kwargs.get("maxsplit")?);
    kwargs.assert_all_used()?;
    let separator = match separator {
        None => None,
        Some(v) => Some(v.as_str().ok_or_else(|| invalid("split: the separator is not a string"))?.to_string()),
    };
    if separator.as_deref() == Some("") {
        return Err(invalid("split: empty separator"));
    }
    let most = most.map(i64::try_from).transpose()?.and_then(|n| usize::try_from(n).ok());
    Ok((separator, most))
}

fn split(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most) = split_args(args)?;
    let parts: Vec<&str> = match (&separator, most) {
        (Some(separator), None) => text.split(separator).collect(),
        (Some(separator), Some(n)) => text.splitn(n.saturating_add(1), separator).collect(),
        (None, None) => text.split(space).filter(|part| !part.is_empty()).collect(),
        (None, Some(n)) => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_start_matches(space));
            while parts.len() < n
                && let Some((part, after)) = rest.split_once(space)
            {
                parts.push(part);
                rest = after.trim_start_matches(space);
            }
            // What is left keeps the space at its end, but for a text that has no more than that.
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most) = split_args(args)?;
    let mut parts: Vec<&str> = match (&separator, most) {
        (Some(separator), None) => text.rsplit(separator).collect(),
        (Some(separator), Some(n)) => text.rsplitn(n.saturating_add(1), separator).collect(),
        (None, None) => return split(text, &[]),
        (None, Some(n)) => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end_matches(space));
            while parts.len() < n
                && let Some((before, part)) = rest.rsplit_once(space)
            {
                parts.push(part);
                rest = before.trim_end_matches(space);
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Python's line ends: `\r\n` as one, and more than Rust's.
fn ends_line(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

fn splitlines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.or(kwargs.get("keepends")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let at = rest.find(ends_line).unwrap_or(rest.len());
        let width =
            if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(0, char::len_utf8) };
        lines.push(Value::from(&rest[..if keep { at + width } else { at }]));
        rest = &rest[at + width..];
    }
    Ok(Value::from(lines))
}
