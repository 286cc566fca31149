//! Functions that chat templates take for granted because transformers runs them in Python: `json.dumps`, and the methods
//! of strings that [`minijinja_contrib::pycompat`] does not have.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Deepest nesting that [`dumps`] writes; Python stops at about 1000.
const MAX_DEPTH: usize = 256;

/// Most bytes of a text that a function of these makes at once, which the engine's fuel does not count: memory that is not
/// there ends the process.
const LONGEST: usize = 16 << 20;

/// Arguments of `json.dumps`, as transformers' filter `tojson` takes them.
#[derive(Debug)]
pub(super) struct Dumps {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl Default for Dumps {
    fn default() -> Self {
        Self {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            sort_keys: false,
        }
    }
}

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        Ok(args.get(index).cloned().or(named).filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let mut dumps = Dumps::default();
    if let Some(ascii) = argument(0, "ensure_ascii")? {
        dumps.ensure_ascii = ascii.is_true();
    }
    if let Some(indent) = argument(1, "indent")? {
        dumps.indent = Some(indent_unit(&indent)?);
        dumps.item_separator = ",".into();
    }
    if let Some(separators) = argument(2, "separators")? {
        let parts: Vec<Value> = separators.try_iter()?.collect();
        let [item, key] = &parts[..] else { return Err(invalid("tojson: separators: expected two strings")) };
        dumps.item_separator = short("separators", item.to_string())?;
        dumps.key_separator = short("separators", key.to_string())?;
    }
    if let Some(sort) = argument(3, "sort_keys")? {
        dumps.sort_keys = sort.is_true();
    }
    if args.len() > 4 {
        return Err(invalid("tojson: expected at most 4 arguments"));
    }
    kwargs.assert_all_used()?;
    dumps.text(value)
}

/// A text that is written many times over.
fn short(name: &str, text: String) -> Result<String, Error> {
    if text.len() > 64 { Err(invalid(&format!("tojson: {name}: expected at most 64 bytes"))) } else { Ok(text) }
}

/// A level's indentation: so many spaces, or the string itself.
fn indent_unit(indent: &Value) -> Result<String, Error> {
    if let Some(unit) = indent.as_str() {
        return short("indent", unit.into());
    }
    let width = match bool::try_from(indent.clone()) {
        Ok(one) if indent.kind() == ValueKind::Bool => i64::from(one),
        _ => i64::try_from(indent.clone())?,
    };
    // Python multiplies a space by it, so what is below zero is as zero.
    let width = usize::try_from(width).unwrap_or(0);
    if width > 64 { Err(invalid("tojson: indent: expected at most 64")) } else { Ok(" ".repeat(width)) }
}

impl Dumps {
    /// `json.dumps(value)` with these arguments.
    pub fn text(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(&mut out, value, 0)?;
        Ok(out)
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        // A list may hold another many times over.
        bounded("tojson", out.len())?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.quote(out, value.as_str().unwrap_or_default()),
            // A generator is none of what Python writes, but minijinja's lazy sequences (a list repeated or joined) are.
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all(out, ['[', ']'], depth, items, |out, item| self.write(out, &item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_all(out, ['{', '}'], depth, keys, |out, key| {
                    self.write_key(out, &key)?;
                    out.push_str(&self.key_separator);
                    self.write(out, &value.get_item(&key)?, depth + 1)
                })?;
            }
            other => return Err(invalid(&format!("tojson: {other} is not JSON serializable"))),
        }
        Ok(())
    }

    fn write_all(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        depth: usize,
        items: Vec<Value>,
        mut write: impl FnMut(&mut String, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let newline = |out: &mut String, depth: usize| {
            if let Some(unit) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(unit));
            }
        };
        let empty = items.is_empty();
        out.push(open);
        for (i, item) in items.into_iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item_separator);
            }
            newline(out, depth + 1);
            write(out, item)?;
        }
        if !empty {
            newline(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn write_key(&self, out: &mut String, key: &Value) -> Result<(), Error> {
        let text = match key.kind() {
            ValueKind::String => key.as_str().unwrap_or_default().to_string(),
            ValueKind::None => "null".into(),
            ValueKind::Bool => String::from(if key.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(key),
            other => return Err(invalid(&format!("tojson: a key is a {other}"))),
        };
        self.quote(out, &text);
        Ok(())
    }

    fn quote(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A number as Python writes it.
fn number(value: &Value) -> String {
    match value.is_integer() {
        true => value.to_string(),
        false => f64::try_from(value.clone()).map_or_else(|_| value.to_string(), json_float),
    }
}

fn json_float(x: f64) -> String {
    match x {
        x if x.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        x => float(x),
    }
}

/// `repr` of a Python float: the shortest digits that read back as the same number, with an exponent where it is below
/// -4 or above 15.
pub(super) fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() { "nan".into() } else { String::from(if x > 0.0 { "inf" } else { "-inf" }) };
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        0 if x == 0.0 => String::from(if x.is_sign_negative() { "-0.0" } else { "0.0" }),
        e if (-4..16).contains(&e) => {
            let plain = x.to_string();
            if plain.contains('.') { plain } else { plain + ".0" }
        }
        e => format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs()),
    }
}

/// The test `sequence`: what has a length and items, texts and dictionaries with it.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

/// The filter `int(default=0, base=10)`.
pub(super) fn int(value: &Value, default: Option<Value>, base: Option<u32>) -> Value {
    let otherwise = || default.unwrap_or(Value::from(0));
    let Some(text) = value.as_str() else {
        return match value.kind() {
            ValueKind::Bool => Value::from(i64::from(value.is_true())),
            ValueKind::Number if value.is_integer() => value.clone(),
            _ => f64::try_from(value.clone()).map_or_else(|_| otherwise(), |x| Value::from(x as i64)),
        };
    };
    let text = text.trim().replace('_', "");
    match i128::from_str_radix(&text, base.filter(|b| (2..=36).contains(b)).unwrap_or(10)) {
        Ok(n) => i64::try_from(n).map_or_else(|_| Value::from(n), Value::from),
        Err(_) => text.parse::<f64>().ok().filter(|x| x.is_finite()).map_or_else(otherwise, |x| Value::from(x as i64)),
    }
}

/// The filter `float(default=0.0)`.
pub(super) fn to_float(value: &Value, default: Option<Value>) -> Value {
    let parsed = match value.as_str() {
        Some(text) => text.trim().replace('_', "").parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    parsed.map(Value::from).or(default).unwrap_or(Value::from(0.0))
}

/// Methods that Python's strings and dictionaries have, for [`minijinja::Environment::set_unknown_method_callback`].
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, name, args)
    {
        return result;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
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
            let digits = text.trim_start_matches(['+', '-']);
            let sign = &text[..text.len() - digits.len()];
            Value::from(format!("{sign}{}{digits}", "0".repeat(padding(text, width))))
        }),
        "ljust" => pad(text, args, |width| (0, width)),
        "rjust" => pad(text, args, |width| (width, 0)),
        "splitlines" => splitlines(text, args),
        "replace" => replace(text, args),
        "join" => join(text, args),
        // Made by pycompat, behind this.
        "format" => match check_fields(text) {
            Ok(()) => return None,
            Err(error) => Err(error),
        },
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

/// Refuses a text of so many bytes.
fn bounded(call: &str, bytes: usize) -> Result<(), Error> {
    if bytes > LONGEST { Err(invalid(&format!("{call}: a text of more than {LONGEST} bytes"))) } else { Ok(()) }
}

fn replace(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
    // Python's negative count is none.
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let found = text.matches(old).take(count).count();
    bounded("replace", text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(Value::from(text.replacen(old, new, count)))
}

fn join(separator: &str, args: &[Value]) -> Result<Value, Error> {
    let (values,): (&Value,) = from_args(args)?;
    // A text's items are its characters.
    let characters = values.as_str().map(|text| text.chars().map(Value::from).collect::<Value>());
    let mut out = String::new();
    for (i, value) in characters.as_ref().unwrap_or(values).try_iter()?.checked().enumerate() {
        let value = value?;
        let part = value.as_str().ok_or_else(|| invalid(&format!("join: item {i} is a {}", value.kind())))?;
        bounded("join", out.len() + separator.len() + part.len())?;
        out.push_str(if i > 0 { separator } else { "" });
        out.push_str(part);
    }
    Ok(Value::from(out))
}

/// Refuses fields of `format` that are wider than any text of a conversation wants, and fields in fields, which may be so.
fn check_fields(text: &str) -> Result<(), Error> {
    for field in text.replace("{{", "").split('{').skip(1) {
        let Some((field, _)) = field.split_once('}') else { return Err(invalid("format: a field without an end")) };
        let numbers = field.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
        if numbers.into_iter().any(|digits| digits.parse::<usize>().is_ok_and(|n| n > 4096) || digits.len() > 4) {
            return Err(invalid("format: a field of more than 4096 characters"));
        }
    }
    Ok(())
}

/// Characters that a text lacks of a width, which is bounded.
fn padding(text: &str, width: usize) -> usize {
    width.min(4096).saturating_sub(text.chars().count())
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
fn splitlines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.or(kwargs.get("keepends")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let end = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let at = rest.find(end).unwrap_or(rest.len());
        let width =
            if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(0, char::len_utf8) };
        lines.push(Value::from(&rest[..if keep { at + width } else { at }]));
        rest = &rest[at + width..];
    }
    Ok(Value::from(lines))
}

fn invalid(problem: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that Python 3.12 printed.
    #[test]
    fn floats_as_python_writes_them() {
        for (x, expected) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (123456789012345.0, "123456789012345.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.2345678901234568e+29, "1.2345678901234568e+29"),
            (1e100, "1e+100"),
            (1.0 / 3.0, "0.3333333333333333"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float(x), expected);
        }
        assert_eq!(json_float(f64::INFINITY), "Infinity");
    }

    #[test]
    fn values_that_are_nested_too_deeply_are_refused() {
        let mut value = Value::from(1);
        for _ in 0..=MAX_DEPTH {
            value = Value::from(vec![value]);
        }
        let message = Dumps::default().text(&value).expect_err("refused").to_string();
        assert!(message.contains("nested too deeply"), "{message}");
        let inner = value.get_item(&Value::from(0)).expect("the list in it");
        Dumps::default().text(&inner).expect("one less is written");
    }
}
