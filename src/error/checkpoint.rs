//! What can be wrong with a checkpoint.

/// A checkpoint cannot be read, or is not what its `config.json` says.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{path}: {message}")]
    Io {
        /// File or folder.
        path: String,
        /// The system's message.
        message: String,
    },
    /// `config.json` or the index does not parse or holds impossible values.
    #[error("{path}: field {field}: expected {expected}, found {found}")]
    Config {
        /// The file.
        path: String,
        /// JSON key.
        field: String,
        /// What is needed.
        expected: String,
        /// What is there.
        found: String,
    },
    /// `model_type` names a family this crate does not know.
    #[error("{path}: unknown model_type {found:?}; known: {known}")]
    UnknownFamily {
        /// The file.
        path: String,
        /// The model_type found.
        found: String,
        /// Comma-separated known families.
        known: String,
    },
    /// `model_type` names a family whose blocks the layer cannot compute.
    #[error("{path}: model_type {found:?} is not supported: the layer has no {lacking}")]
    UnsupportedFamily {
        /// The file.
        path: String,
        /// The model_type found.
        found: String,
        /// What the layer lacks for it.
        lacking: &'static str,
    },
    /// A safetensors header is damaged.
    #[error("{path}: damaged safetensors header: {problem}")]
    Header {
        /// The file.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// A file is larger than anything of its kind needs to be.
    #[error("{path}: {bytes} bytes, at most {limit} are read")]
    TooLarge {
        /// The file.
        path: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The index names a file that is not a plain file of the checkpoint's folder.
    #[error("{path}: shard {entry:?}: {problem}")]
    OutsideFolder {
        /// The index.
        path: String,
        /// The file it names.
        entry: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A file ended before a tensor did: it has shrunk since it was opened.
    #[error("{path}: tensor {tensor}: expected {expected} bytes at offset {offset}, the file ends before them")]
    Truncated {
        /// The file.
        path: String,
        /// Name of the tensor on disk.
        tensor: String,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        expected: usize,
    },
    /// A tensor that `config.json` calls for is not there.
    #[error("{path}: tensor {tensor} is missing; expected {expected}")]
    Missing {
        /// The file or folder.
        path: String,
        /// Name of the tensor on disk.
        tensor: String,
        /// What is needed.
        expected: String,
    },
    /// The block holds a tensor that its family does not have.
    #[error("{path}: unexpected tensor {tensor} ({found}); {family} has none of this name")]
    Unexpected {
        /// The file or folder.
        path: String,
        /// Name of the tensor on disk.
        tensor: String,
        /// What is there.
        found: String,
        /// The family.
        family: String,
    },
    /// A tensor is of another shape or type.
    #[error("{path}: tensor {tensor}: expected {expected}, found {found}")]
    Tensor {
        /// The file or folder.
        path: String,
        /// Name of the tensor on disk.
        tensor: String,
        /// What is needed.
        expected: String,
        /// What is there.
        found: String,
    },
}
