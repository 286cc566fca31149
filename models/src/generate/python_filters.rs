//! The engine's filters and tests that write values as text, with a bound: the engine makes the whole text before it
//! charges for it, and a list that holds another one twice, and so on forty times, has 2⁴⁰ leaves.

use minijinja::value::{Kwargs, Rest, StringInput, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, State, Value, filters, tests};

use super::python;
use super::python_budget::{Budget, shown, written};

/// Bytes of a value in a list.
const PIECE: usize = 32;

/// Replaces them in an environment.
pub(super) fn add(environment: &mut Environment<'_>) {
    for (name, filter) in [
        ("upper", Value::from_function(filters::upper)),
        ("lower", Value::from_function(filters::lower)),
        ("title", Value::from_function(filters::title)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("trim", Value::from_function(filters::trim)),
        ("escape", Value::from_function(filters::escape)),
        ("e", Value::from_function(filters::escape)),
        ("safe", Value::from_function(filters::safe)),
        // Names of tests and of attributes may be any value.
        ("select", Value::from_function(filters::select)),
        ("reject", Value::from_function(filters::reject)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
    ] {
        environment.add_filter(name, bounded(filter));
    }
    for (name, test) in [
        ("startingwith", Value::from_function(tests::is_startingwith)),
        ("endingwith", Value::from_function(tests::is_endingwith)),
        ("in", Value::from_function(tests::is_in)),
    ] {
        environment.add_test(name, bounded(test));
    }
    environment.add_filter("string", string);
    environment
        .add_filter("pprint", |state: &State, value: &Value| written(format_args!("{value:#?}"), Budget::of(state)));
    environment.add_filter("join", join);
    environment.add_filter("format", format);
    environment.add_filter("indent", indent);
    environment.add_filter("replace", replace);
    environment.add_filter("split", split);
    environment.add_filter("lines", lines);
    // It writes all variables, and is none of Jinja's functions.
    environment.remove_global("debug");
}

/// Bytes of the values that are no texts yet, where the steps pay for them all together.
fn room<'v>(values: impl IntoIterator<Item = &'v Value>, budget: Budget<'_>) -> Result<usize, Error> {
    let mut bytes = 0usize;
    for value in values {
        bytes = bytes.saturating_add(match value.as_str() {
            Some(_) => 0,
            None => shown(value, budget)?,
        });
        budget.ensure(bytes)?;
    }
    Ok(bytes)
}

/// The filter or test, after a look at what its arguments are as texts.
fn bounded(
    function: Value,
) -> impl Fn(&mut State<'_, '_>, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state, args| {
        let args = args.into_values();
        room(&args, Budget::of(state))?;
        function.call(state, &args)
    }
}

fn string(state: &State, value: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        return Ok(value.clone());
    }
    written(format_args!("{value}"), Budget::of(state)).map(Value::from)
}

/// `join(d='', attribute=None)`: an item's attribute is part of the item.
fn join(state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let budget = Budget::of(state);
    room(args.iter().skip(1), budget)?;
    if let Some(items) = args.first().and_then(|items| items.try_iter().ok()) {
        let mut bytes = 0usize;
        for item in items {
            // Once more than the engine's own: it is looked at twice.
            budget.spend(1)?;
            bytes = bytes.saturating_add(shown(&item, budget)?);
            budget.ensure(bytes)?;
        }
    }
    Value::from_function(filters::join).call(state, &args)
}

/// `format(*args, **kwargs)`: the engine bounds widths; a value may be written by every field.
fn format(state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let budget = Budget::of(state);
    let mut longest = 0;
    for value in args.iter().skip(1) {
        longest = longest.max(shown(value, budget)?);
    }
    if let Some(text) = args.first().and_then(Value::as_str) {
        budget.ensure(text.matches('%').count().saturating_mul(longest).saturating_add(text.len()))?;
    }
    Value::from_function(filters::format).call(state, &args)
}

/// `indent(width=4, first=False, blank=False)`.
fn indent(state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    type Args<'v> = (&'v Value, Option<usize>, Option<bool>, Option<bool>, Kwargs);
    let args = args.into_values();
    let budget = Budget::of(state);
    let bytes = room(&args, budget)?;
    let (text, width, _, _, kwargs): Args<'_> = from_args(&args)?;
    let width = width.or(kwargs.get("width")?).unwrap_or(0);
    let (length, lines) = text.as_str().map_or((bytes, bytes), |text| (text.len(), text.matches('\n').count()));
    budget.ensure(lines.saturating_add(1).saturating_mul(width).saturating_add(length))?;
    Value::from_function(filters::indent).call(state, &args)
}

/// `replace(old, new, count=None)`.
fn replace(state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let budget = Budget::of(state);
    room(&args, budget)?;
    let mut texts = Vec::with_capacity(args.len());
    for (i, arg) in args.iter().enumerate() {
        texts.push(if i < 3 { Value::from(StringInput::new(state, arg)?.as_str()) } else { arg.clone() });
    }
    match texts.split_first() {
        Some((text, rest)) => python::replace(text.as_str().unwrap_or_default(), rest, budget),
        None => Err(Error::from(minijinja::ErrorKind::MissingArgument)),
    }
}

/// `split(separator=None, maxsplits=None)`: a piece is a value of some 32 bytes, be it as short as it may.
fn split(state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let budget = Budget::of(state);
    room(&args, budget)?;
    if let Some(text) = args.first().and_then(Value::as_str) {
        let pieces = match args.get(1).and_then(Value::as_str) {
            Some("") => text.len().saturating_add(2),
            Some(separator) => text.matches(separator).count(),
            None => text.split_whitespace().count(),
        };
        let most = args.get(2).and_then(|most| usize::try_from(most.clone()).ok()).unwrap_or(usize::MAX);
        budget.ensure(pieces.min(most).saturating_add(1).saturating_mul(PIECE))?;
    }
    Value::from_function(filters::split).call(state, &args)
}

/// `lines()`.
fn lines(state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let budget = Budget::of(state);
    room(&args, budget)?;
    if let Some(text) = args.first().and_then(Value::as_str) {
        budget.ensure(text.matches('\n').count().saturating_add(1).saturating_mul(PIECE))?;
    }
    Value::from_function(filters::lines).call(state, &args)
}
