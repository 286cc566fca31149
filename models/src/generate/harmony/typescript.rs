//! JSON schemas of tools' parameters as TypeScript types, with the lines and comments that openai-harmony writes.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::problem;
use crate::generate::error::Result;

/// Deepest schema that is written. Each level takes one stack frame, and indents its lines further.
const DEEPEST: usize = 64;

/// A field of an object; `None` where the value is no object or has none of that name. JSON's null is a value.
pub(super) fn field(value: &Value, name: &str) -> Option<Value> {
    let field = (value.kind() == ValueKind::Map).then(|| value.get_attr(name).ok()).flatten();
    field.filter(|field| !field.is_undefined())
}

/// A field that is a text.
pub(super) fn text(value: &Value, name: &str) -> Option<String> {
    field(value, name)?.as_str().map(str::to_string)
}

/// Items of a field that is a list.
pub(super) fn list(value: &Value, name: &str) -> Option<Vec<Value>> {
    items(&field(value, name)?)
}

/// Items of a list.
pub(super) fn items(value: &Value) -> Option<Vec<Value>> {
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    is_list.then(|| value.try_iter().ok()).flatten().map(Iterator::collect)
}

/// A value as JSON without spaces.
pub(super) fn json(value: &Value) -> Result<String> {
    serde_json::to_string(value).map_err(|e| problem(format!("{value}: {e}")))
}

/// The type of a schema, whose further lines are not indented.
pub(super) fn type_of(schema: &Value) -> Result<String> {
    Writer { depth: 0 }.type_of(schema, "")
}

/// One level of a schema.
#[derive(Clone, Copy)]
struct Writer {
    depth: usize,
}

/// Whether a default that is one of an enumeration's texts stands without quotes.
#[derive(Clone, Copy, PartialEq)]
enum Quotes {
    OfEnumerationsToo,
    OfOthers,
}

impl Writer {
    fn type_of(self, schema: &Value, indent: &str) -> Result<String> {
        if self.depth > DEEPEST {
            return Err(problem(format!("tools: expected schemas of at most {DEEPEST} levels")));
        }
        if let Some(variants) = list(schema, "oneOf") {
            let line = |variant: &Value| {
                let end = comment(variant, true, Quotes::OfEnumerationsToo)?;
                Ok(format!("\n{indent} | {}{end}", self.variant(variant, indent)?))
            };
            return variants.iter().map(line).collect();
        }
        if let Some(names) = list(schema, "type") {
            let names = names.iter().filter_map(Value::as_str);
            let names: Vec<&str> = names.map(|name| if name == "integer" { "number" } else { name }).collect();
            return Ok(if names.is_empty() { "any".into() } else { names.join(" | ") });
        }
        Ok(match text(schema, "type").as_deref() {
            Some("object") => self.object(schema, indent)?,
            Some("string") => enumeration(schema).unwrap_or_else(|| "string".into()),
            Some("number" | "integer") => "number".into(),
            Some("boolean") => "boolean".into(),
            Some("array") => match field(schema, "items") {
                Some(items) => format!("{}[]", self.below().type_of(&items, indent)?),
                None => "Array<any>".into(),
            },
            _ => "any".into(),
        })
    }

    fn below(self) -> Self {
        Self { depth: self.depth + 1 }
    }

    /// One of several types.
    fn variant(self, schema: &Value, indent: &str) -> Result<String> {
        Ok(nullable(schema, self.below().type_of(schema, &format!("{indent}   "))?))
    }

    fn object(self, schema: &Value, indent: &str) -> Result<String> {
        let mut out = text(schema, "description").map_or(String::new(), |text| format!("{indent}// {text}\n"));
        out.push_str("{\n");
        let required = list(schema, "required").unwrap_or_default();
        let properties = field(schema, "properties").filter(|properties| properties.kind() == ValueKind::Map);
        for name in properties.iter().flat_map(Value::try_iter).flatten() {
            let property = properties.as_ref().and_then(|all| all.get_item(&name).ok()).unwrap_or_default();
            let mark = if required.contains(&name) { "" } else { "?" };
            out.push_str(&self.property(&format!("{name}{mark}"), &property, indent)?);
        }
        Ok(format!("{out}{indent}}}"))
    }

    /// A property's lines: comments, name and type.
    fn property(self, name: &str, schema: &Value, indent: &str) -> Result<String> {
        let variants = list(schema, "oneOf");
        // Also where it is no list, and so says nothing.
        let has_variants = field(schema, "oneOf").is_some();
        let mut out = String::new();
        if let Some(title) = text(schema, "title") {
            out += &format!("{indent}// {title}\n{indent}//\n");
        }
        let description = text(schema, "description");
        if let Some(description) = description.as_ref().filter(|_| !has_variants) {
            out += &format!("{indent}// {description}\n");
        }
        let examples = list(schema, "examples").unwrap_or_default();
        if !examples.is_empty() {
            out += &format!("{indent}// Examples:\n");
            let texts = examples.iter().filter_map(Value::as_str);
            texts.for_each(|example| out += &format!("{indent}// - \"{example}\"\n"));
        }
        let Some(variants) = variants else {
            let default = default(schema, Quotes::OfOthers)?.filter(|_| !has_variants);
            let ends = default.map_or(String::new(), |default| format!(" // {default}"));
            let type_of = nullable(schema, self.below().type_of(schema, &format!("{indent}    "))?);
            return Ok(format!("{out}{indent}{name}: {type_of},{ends}\n"));
        };
        let first = variants.first().and_then(|variant| text(variant, "description"));
        if let Some(description) = description.as_ref().filter(|description| first.as_ref() != Some(description)) {
            out += &format!("{indent}// {description}\n");
        }
        if let Some(default) = default(schema, Quotes::OfOthers)? {
            out += &format!("{indent}// {default}\n");
        }
        out += &format!("{indent}{name}:\n");
        for (i, variant) in variants.iter().enumerate() {
            // The property's description stands for the first one's, and for what is the same.
            let is_said = description.is_some() && (i == 0 || text(variant, "description") == description);
            let end = comment(variant, !is_said, Quotes::OfOthers)?;
            out += &format!("{indent} | {}{end}\n", self.variant(variant, indent)?);
        }
        Ok(format!("{out}{indent},\n"))
    }
}

/// The texts of a list of values; `None` where there is none.
fn enumeration(schema: &Value) -> Option<String> {
    let texts = list(schema, "enum")?;
    let texts: Vec<String> = texts.iter().filter_map(|text| Some(format!("\"{}\"", text.as_str()?))).collect();
    (!texts.is_empty()).then(|| texts.join(" | "))
}

fn nullable(schema: &Value, type_of: String) -> String {
    let nullable = field(schema, "nullable").is_some_and(|value| value.kind() == ValueKind::Bool && value.is_true());
    if nullable && !type_of.contains("null") { type_of + " | null" } else { type_of }
}

/// `default: ...`, where a schema has one.
fn default(schema: &Value, quotes: Quotes) -> Result<Option<String>> {
    let Some(value) = field(schema, "default") else { return Ok(None) };
    let of_enumeration = list(schema, "enum").is_some_and(|values| !values.is_empty());
    let value = match value.as_str() {
        Some(text) if !of_enumeration => format!("\"{text}\""),
        Some(text) if quotes == Quotes::OfOthers => text.into(),
        _ => json(&value)?,
    };
    Ok(Some(format!("default: {value}")))
}

/// What stands behind one of several types.
fn comment(schema: &Value, with_description: bool, quotes: Quotes) -> Result<String> {
    let description = text(schema, "description").filter(|_| with_description);
    let parts: Vec<String> = description.into_iter().chain(default(schema, quotes)?).collect();
    Ok(if parts.is_empty() { String::new() } else { format!(" // {}", parts.join(" ")) })
}
