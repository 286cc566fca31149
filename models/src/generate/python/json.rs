//! `json.dumps`, and numbers as Python writes them.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, State, Value};

use crate::generate::python_budget::{BoundedText, Budget};

use super::invalid;

/// Deepest nesting that [`dumps`] writes; Python stops at about 1000.
const MAX_DEPTH: usize = 256;

/// Arguments of `json.dumps`, as transformers' filter `tojson` takes them.
#[derive(Debug)]
pub(in crate::generate) struct Dumps {
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
pub(in crate::generate) fn tojson(
    state: &State,
    value: &Value,
    args: Rest<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
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
        let text = |part: &Value| part.as_str().map(String::from).ok_or_else(|| invalid("tojson: separators: no text"));
        dumps.item_separator = short("separators", text(item)?)?;
        dumps.key_separator = short("separators", text(key)?)?;
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
pub(in crate::generate) fn float(x: f64) -> String {
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
