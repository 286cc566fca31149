//! A rendered conversation: which of it is special tokens, and which is text.

use crate::generate::error::{Error, Result};
use crate::generate::tokenizer::Tokenizer;

/// One conversation, in order. openai-harmony encodes each text by itself, so that no token is of two of them, and takes
/// what looks like a special token in one as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::generate) struct Pieces(Vec<Piece>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Special(&'static str),
    Text(String),
}

impl Pieces {
    pub(super) fn push_special(&mut self, token: &'static str) {
        self.0.push(Piece::Special(token));
    }

    pub(super) fn push_text(&mut self, text: impl Into<String>) {
        self.0.push(Piece::Text(text.into()));
    }

    /// All of it as one text.
    pub fn text(&self) -> String {
        let text = |piece: &'_ Piece| match piece {
            Piece::Special(token) => token.to_string(),
            Piece::Text(text) => text.clone(),
        };
        self.0.iter().map(text).collect()
    }

    /// Its ids.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] where one of the special tokens is none of the tokenizer's, and where it fails.
    pub fn ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(text) => ids.extend(tokenizer.encode_ordinary(text)?),
                Piece::Special(token) => ids.push(tokenizer.id(token).ok_or_else(|| Error::Tokenizer {
                    call: "Tokenizer::encode_chat",
                    problem: format!("{token:?}, which harmony's format needs, is none of the tokenizer's tokens"),
                })?),
            }
        }
        Ok(ids)
    }
}
