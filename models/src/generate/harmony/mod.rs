//! Conversations of gpt-oss in the format that it was trained on, openai-harmony: a system message that says who the
//! model is and which channels there are, a developer message with instructions and tools, and messages that name their
//! channel: `analysis` is reasoning, `commentary` calls of tools and what is said beside them, `final` the answer.
//!
//! Published tokenizers of gpt-oss come with and without a chat template; this is for those without. Renderings are
//! those of openai-harmony 0.0.8.

mod channels;
mod contents;
mod messages;
mod pieces;
mod typescript;

use std::path::Path;

pub use channels::Channels;
pub(super) use channels::{ChannelStream, Marks};
pub(super) use messages::render;
pub(super) use pieces::Pieces;

use super::error::{Error, Result};
use super::folder;

/// Special tokens that begin, divide and end messages.
const TOKENS: [&str; 5] = [START, CHANNEL, MESSAGE, END, CALL];

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
/// In headers, before a content's form.
const CONSTRAIN: &str = "<|constrain|>";

/// True of the folder of a gpt-oss model, or of a tokenizer with harmony's special tokens.
pub(super) fn is_of(dir: &Path) -> Result<bool> {
    let config = super::tokenizer::config(dir)?;
    if let Some(family) = config.get("model_type").and_then(|family| family.as_str()) {
        return Ok(family == "gpt_oss");
    }
    // The list of added tokens is in one of these files, or in both.
    let config = folder::json(dir, "tokenizer_config.json")?;
    if let Some(added) = config.get("added_tokens_decoder").and_then(|added| added.as_object()) {
        return Ok(has_all(added.values()));
    }
    let text = folder::text(dir, "tokenizer.json", folder::MAX_TOKENIZER)?.unwrap_or_else(|| "{}".into());
    let tokenizer: AddedTokens =
        serde_json::from_str(&text).map_err(|e| folder::problem(dir, "tokenizer.json", &e.to_string()))?;
    Ok(has_all(tokenizer.added_tokens.iter()))
}

/// What of a `tokenizer.json` is looked at.
#[derive(serde::Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<serde_json::Value>,
}

fn has_all<'a>(tokens: impl Iterator<Item = &'a serde_json::Value>) -> bool {
    let texts: Vec<&str> = tokens.filter_map(folder::token_text).collect();
    TOKENS.iter().all(|token| texts.contains(token))
}

fn problem(problem: impl Into<String>) -> Error {
    Error::Conversation { problem: problem.into() }
}

#[cfg(test)]
mod tests;
