//! The sources of a folder's chat templates, by name.

use std::path::Path;

use super::error::Result;
use super::folder;

/// The name of the template that is used where none is asked for.
pub(super) const DEFAULT: &str = "default";

/// Templates that are files of their own.
pub(super) fn files(dir: &Path) -> Result<Vec<(String, String)>> {
    let text = |dir: &Path, name: &str| folder::text(dir, name, folder::MAX_TEMPLATE);
    let mut sources: Vec<_> =
        text(dir, "chat_template.jinja")?.map(|source| (DEFAULT.into(), source)).into_iter().collect();
    let more = dir.join("additional_chat_templates");
    let fail = |e: std::io::Error| folder::problem(dir, "additional_chat_templates", &e.to_string());
    let entries = match std::fs::read_dir(&more) {
        // A link that leads nowhere is there.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && more.symlink_metadata().is_err() => return Ok(sources),
        entries => entries.map_err(fail)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        // A name that is no text ends with none of what is looked for.
        files.extend(entry.map_err(fail)?.file_name().into_string().ok());
    }
    files.sort();
    for file in files {
        if let Some(name) = file.strip_suffix(".jinja")
            && let Some(source) = text(&more, &file)?
        {
            sources.push((name.into(), source));
        }
    }
    Ok(sources)
}

/// `chat_template` of `tokenizer_config.json`.
pub(super) fn named(dir: &Path, field: Option<&serde_json::Value>) -> Result<Vec<(String, String)>> {
    use serde_json::Value as Json;
    let pair = |entry: &Json| Some((entry["name"].as_str()?.to_string(), entry["template"].as_str()?.to_string()));
    let sources = match field {
        None | Some(Json::Null) => Some(Vec::new()),
        Some(Json::String(source)) => Some(vec![(DEFAULT.into(), source.clone())]),
        Some(Json::Array(list)) => list.iter().map(pair).collect(),
        Some(Json::Object(map)) => {
            map.iter().map(|(name, source)| Some((name.clone(), source.as_str()?.to_string()))).collect()
        }
        Some(_) => None,
    };
    let expected = "chat_template: expected a text, or a list of objects with name and template";
    sources.ok_or_else(|| folder::problem(dir, "tokenizer_config.json", expected))
}
