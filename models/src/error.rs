//! Typed errors of loading and running a decoder.

use moebius::checkpoint::printable;

/// Result with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layer knows the family's experts, but there is no decoder around them.
    #[error("{}: field model_type: expected one of {known}, found \"{}\"", printable(.path), printable(.found))]
    Family {
        /// The file.
        path: String,
        /// Value that is there.
        found: String,
        /// The families with a decoder.
        known: String,
    },
    /// `config.json` cannot be read, or holds what this decoder does not do.
    #[error("{}: field {field}: expected {}, found {}", printable(.path), printable(.expected), printable(.found))]
    Config {
        /// The file.
        path: String,
        /// JSON key.
        field: &'static str,
        /// Requirement of the decoder.
        expected: String,
        /// Value that is there.
        found: String,
    },
    /// A tensor or argument has the wrong shape.
    #[error("{call}: tensor {}: expected shape {expected}, found {found:?}", printable(.tensor))]
    Shape {
        /// The call that refused.
        call: &'static str,
        /// Name of the tensor, on disk for weights.
        tensor: String,
        /// Sizes the call needs.
        expected: String,
        /// Sizes it was given.
        found: Vec<usize>,
    },
    /// A layer on disk has a tensor that the decoder, as its configuration is, has no place for, or the output projection
    /// a bias. Tensors beside the layers are not looked at otherwise.
    #[error("{call}: tensor {}: the decoder that {} describes has none of this name", printable(.tensor), printable(.path))]
    Unread {
        /// The call that refused.
        call: &'static str,
        /// The configuration's file.
        path: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// The call cannot be made on this model.
    #[error("{call}: {}", printable(.problem))]
    Usage {
        /// The call that refused.
        call: &'static str,
        /// The problem, and how to mend it.
        problem: String,
    },
    /// A token's id is none of the vocabulary's.
    #[error("{call}: sequence {row}, position {position}: expected an id in 0..{vocabulary}, found {id}")]
    TokenId {
        /// The call that refused.
        call: &'static str,
        /// Row of the ids.
        row: usize,
        /// Column of the ids.
        position: usize,
        /// The id.
        id: i64,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// The checkpoint or the layer failed.
    #[error(transparent)]
    Moebius(#[from] moebius::Error),
    /// Candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// As other ranks are told of it.
    pub(crate) fn refusal_reason(&self) -> String {
        match self {
            Self::Candle(error) => moebius::candle::refusal_reason(error),
            other => other.to_string(),
        }
    }
}

/// For operations of this crate inside functions that return candle's errors. What was candle's, or the layer's, is as it
/// was; all else is wrapped.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            Error::Moebius(error) => error.into(),
            other => Self::wrap(other),
        }
    }
}
