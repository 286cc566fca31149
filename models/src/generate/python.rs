//! Functions that chat templates take for granted because transformers runs them in Python: `json.dumps`, and the methods
//! of strings that [`minijinja_contrib::pycompat`] does not have.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::python_budget::{BoundedText, Budget, shown};

/// Deepest nesting that [`dumps`] writes; Python stops at about 1000.
const MAX_DEPTH: usize = 256;

/// Most characters that a method fills a text up to.
const WIDEST: usize = 4096;
/// Most bytes of a number without digits behind its point: those of 1e308, with commas between.
const LONGEST_NUMBER: usize = 512;

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
pub(super) fn tojson(state: &State, value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
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
    dumps.text(value, Budget::of(state))
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
    /// `json.dumps(value)` with these arguments; each value and each 64 bytes of it are a step.
    pub fn text(&self, value: &Value, budget: Budget<'_>) -> Result<String, Error> {
        let mut out = BoundedText::new(budget);
        self.write(&mut out, value, 0)?;
        Ok(out.text)
    }

    fn write(&self, out: &mut BoundedText<'_>, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        out.budget.spend(1)?;
        match value.kind() {
            ValueKind::None => out.push("null"),
            ValueKind::Bool => out.push(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push(&number(value)),
            ValueKind::String => self.quote(out, value.as_str().unwrap_or_default()),
            // A generator is none of what Python writes, but minijinja's lazy sequences (a list repeated or joined) are.
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?;
                self.write_all(out, ['[', ']'], depth, items, |out, item| self.write(out, &item, depth + 1))
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_all(out, ['{', '}'], depth, keys.into_iter(), |out, key| {
                    self.write_key(out, &key)?;
                    out.push(&self.key_separator)?;
                    self.write(out, &value.get_item(&key)?, depth + 1)
                })
            }
            other => Err(invalid(&format!("tojson: {other} is not JSON serializable"))),
        }
    }

    fn write_all(
        &self,
        out: &mut BoundedText<'_>,
        [open, close]: [char; 2],
        depth: usize,
        items: impl Iterator<Item = Value>,
        mut write: impl FnMut(&mut BoundedText<'_>, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let newline = |out: &mut BoundedText<'_>, depth: usize| match &self.indent {
            Some(unit) => out.push(&format!("\n{}", unit.repeat(depth))),
            None => Ok(()),
        };
        let mut empty = true;
        out.push_char(open)?;
        for item in items {
            if !empty {
                out.push(&self.item_separator)?;
            }
            empty = false;
            newline(out, depth + 1)?;
            write(out, item)?;
        }
        if !empty {
            newline(out, depth)?;
        }
        out.push_char(close)
    }

    fn write_key(&self, out: &mut BoundedText<'_>, key: &Value) -> Result<(), Error> {
        let text = match key.kind() {
            ValueKind::String => key.as_str().unwrap_or_default().to_string(),
            ValueKind::None => "null".into(),
            ValueKind::Bool => String::from(if key.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(key),
            other => return Err(invalid(&format!("tojson: a key is a {other}"))),
        };
        self.quote(out, &text)
    }

    fn quote(&self, out: &mut BoundedText<'_>, text: &str) -> Result<(), Error> {
        out.push_char('"')?;
        for c in text.chars() {
            match c {
                '"' => out.push("\\\"")?,
                '\\' => out.push("\\\\")?,
                '\n' => out.push("\\n")?,
                '\r' => out.push("\\r")?,
                '\t' => out.push("\\t")?,
                '\u{8}' => out.push("\\b")?,
                '\u{c}' => out.push("\\f")?,
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        out.push(&format!("\\u{unit:04x}"))?;
                    }
                }
                c => out.push_char(c)?,
            }
        }
        out.push_char('"')
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
pub(super) fn replace(text: &str, args: &[Value], budget: Budget<'_>) -> Result<Value, Error> {
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
        let text = |value: &Value| Dumps::default().text(value, Budget::none());
        let message = text(&value).expect_err("refused").to_string();
        assert!(message.contains("nested too deeply"), "{message}");
        let inner = value.get_item(&Value::from(0)).expect("the list in it");
        text(&inner).expect("one less is written");
    }
}
