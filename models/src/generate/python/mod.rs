//! Functions that chat templates take for granted because transformers runs them in Python: `json.dumps`, and the methods
//! of strings that [`minijinja_contrib::pycompat`] does not have.

mod json;
mod strings;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

pub(super) use json::{Dumps, float, tojson};
pub(super) use strings::{method, replace};

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

fn invalid(problem: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.to_string())
}
