//! A configuration's entries by name, as ranks compare them.

use std::collections::BTreeMap;

use serde_json::Value;

/// Every entry of a configuration, those of objects by themselves, but for what says where it came from.
pub(crate) fn config_entries(config: &Value) -> BTreeMap<String, String> {
    let mut named = BTreeMap::new();
    for (key, value) in entries(config) {
        match value {
            Value::Object(part) if !part.is_empty() => {
                named.extend(entries(value).map(|(inner, value)| (format!("{key}.{inner}"), value.to_string())));
            }
            _ => drop(named.insert(key.clone(), value.to_string())),
        }
    }
    named
}

fn entries(object: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let is_origin = |key: &str| key.starts_with('_') || key == "transformers_version";
    object.as_object().into_iter().flatten().filter(move |(key, _)| !is_origin(key))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn entries_have_names_of_their_own() {
        let config = json!({"_name_or_path": "here", "transformers_version": "5", "hidden_size": 8, "empty": {},
            "text_config": {"_attn_implementation": "x", "layers": [1, 2], "rope": {"factor": 2.0}}});
        let found = config_entries(&config);
        let found: Vec<(&str, &str)> = found.iter().map(|(name, text)| (&name[..], &text[..])).collect();
        let inner = [("text_config.layers", "[1,2]"), ("text_config.rope", r#"{"factor":2.0}"#)];
        assert_eq!(found, [("empty", "{}"), ("hidden_size", "8"), inner[0], inner[1]]);
        assert!(config_entries(&json!(3)).is_empty());
    }
}
