//! Errors between a text and a decoder.

use moebius::checkpoint::printable;

/// Result with generation's error; the public alias of this name is [`crate::Result`], of another error.
pub(super) type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong in generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the folder cannot be read, or does not hold what it should.
    #[error("{}: {}", printable(.path), printable(.problem))]
    File {
        /// The file.
        path: String,
        /// The problem.
        problem: String,
    },
    /// The tokenizer cannot encode a text or decode ids.
    #[error("{call}: {}", printable(.problem))]
    Tokenizer {
        /// The call that refused.
        call: &'static str,
        /// The tokenizer's report.
        problem: String,
    },
    /// The tokenizer has a token that the decoder's embedding has no row for.
    #[error("tokenizer: token \"{}\" has id {id}; the embedding has {rows} rows", printable(.token))]
    TokenPastEmbedding {
        /// The token of the largest id.
        token: String,
        /// Its id.
        id: u32,
        /// Rows of the embedding.
        rows: usize,
    },
    /// A prompt has an id that the decoder's embedding has no row for.
    #[error("request {request}: id {id} at position {position} of the prompt; the embedding has {rows} rows")]
    IdPastEmbedding {
        /// Index of the request in its batch.
        request: usize,
        /// Index in the prompt.
        position: usize,
        /// The id.
        id: u32,
        /// Rows of the embedding.
        rows: usize,
    },
    /// A prompt without tokens.
    #[error("request {request}: the prompt has no token")]
    EmptyPrompt {
        /// Index of the request in its batch.
        request: usize,
    },
    /// A prompt that leaves no room for a token.
    #[error("request {request}: the prompt has {tokens} tokens, the decoder's context {context}; expected fewer")]
    PromptTooLong {
        /// Index of the request in its batch.
        request: usize,
        /// Tokens of the prompt.
        tokens: usize,
        /// Most tokens of a sequence.
        context: usize,
    },
    /// A parameter is outside its range.
    #[error("{name}: expected {expected}, found {found}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Its range.
        expected: &'static str,
        /// Its value.
        found: String,
    },
    /// There is nothing to draw a token from.
    #[error("logits of a step: {problem}")]
    Logits {
        /// Their contents.
        problem: String,
    },
    /// The folder has no chat template, or none of that name.
    #[error("chat template: {}", printable(.problem))]
    NoTemplate {
        /// The name that was looked for, and those that there are.
        problem: String,
    },
    /// A chat template does not compile, fails, or takes more steps than it may.
    #[error("chat template \"{}\": {}", printable(.name), printable(.problem))]
    Template {
        /// Name of the template, `default` where it has none.
        name: String,
        /// The template engine's report, with the line.
        problem: String,
    },
    /// A chat template refused the conversation by `raise_exception`.
    #[error("chat template \"{}\" refuses the conversation: {}", printable(.name), printable(.message))]
    Refused {
        /// Name of the template, `default` where it has none.
        name: String,
        /// The template's own words.
        message: String,
    },
    /// A conversation that is not what templates take.
    #[error("conversation: {}", printable(.problem))]
    Conversation {
        /// The problem.
        problem: String,
    },
    /// A generated text ended inside a character.
    #[error("request {request}: the text ends inside a character, after {tokens} tokens")]
    IncompleteCharacter {
        /// Index of the request in its batch.
        request: usize,
        /// Tokens generated.
        tokens: usize,
    },
    /// The decoder failed.
    #[error(transparent)]
    Model(#[from] crate::Error),
    /// Candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// As other ranks are told of it.
    pub(super) fn refusal_reason(&self) -> String {
        match self {
            Self::Model(error) => error.refusal_reason(),
            Self::Candle(error) => moebius::candle::refusal_reason(error),
            other => other.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn texts_of_others_do_not_steer_a_terminal() {
        let text = || "a\u{1b}[31m\r\nb".to_string();
        for error in [
            Error::File { path: text(), problem: text() },
            Error::Tokenizer { call: "encode", problem: text() },
            Error::TokenPastEmbedding { token: text(), id: 3, rows: 2 },
            Error::NoTemplate { problem: text() },
            Error::Template { name: text(), problem: text() },
            Error::Refused { name: text(), message: text() },
            Error::Conversation { problem: text() },
            crate::Error::Family { path: text(), found: text(), known: "x".into() }.into(),
            crate::Error::Config { path: text(), field: "f", expected: text(), found: text() }.into(),
            crate::Error::Shape { call: "load", tensor: text(), expected: "[1]".into(), found: vec![2] }.into(),
            crate::Error::Unread { call: "load", path: text(), tensor: text() }.into(),
            crate::Error::from(moebius::Error::Invalid { call: "load", name: text(), expected: text(), found: text() })
                .into(),
        ] {
            let shown = error.to_string();
            assert!(
                shown.contains(r"a\u{1b}[31m\r") && shown.chars().filter(|c| *c != '\n').all(|c| !c.is_control()),
                "{shown:?}"
            );
        }
    }
}
