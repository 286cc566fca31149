//! Errors of checkpoints.

use super::text::printable;

/// Result with a [`CheckpointError`].
pub(crate) type CheckpointResult<T> = std::result::Result<T, CheckpointError>;

/// A checkpoint cannot be read, or is not what its `config.json` says.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{}: {}", printable(.path), printable(.message))]
    Io {
        /// File or folder.
        path: String,
        /// The system's message.
        message: String,
    },
    /// `config.json` or the index does not parse or holds impossible values.
    #[error("{}: field {}: expected {expected}, found {}", printable(.path), printable(.field), printable(.found))]
    Config {
        /// The file.
        path: String,
        /// JSON key.
        field: String,
        /// Requirement.
        expected: String,
        /// Value that is there.
        found: String,
    },
    /// `model_type` names a family this crate does not know.
    #[error("{}: unknown model_type \"{}\"; known: {known}", printable(.path), printable(.found))]
    UnknownFamily {
        /// The file.
        path: String,
        /// The model_type found.
        found: String,
        /// Comma-separated known families.
        known: String,
    },
    /// `model_type` names a family whose blocks the layer cannot compute.
    #[error("{}: model_type \"{}\" is not supported: the layer has no {lacking}", printable(.path), printable(.found))]
    UnsupportedFamily {
        /// The file.
        path: String,
        /// The model_type found.
        found: String,
        /// The feature that the layer lacks for it.
        lacking: &'static str,
    },
    /// A safetensors header is damaged.
    #[error("{}: damaged safetensors header: {}", printable(.path), printable(.problem))]
    Header {
        /// The file.
        path: String,
        /// The problem.
        problem: String,
    },
    /// A file is larger than anything of its kind needs to be.
    #[error("{}: {bytes} bytes, at most {limit} are read", printable(.path))]
    TooLarge {
        /// The file.
        path: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A file that the index names, or another of the checkpoint's, is not a plain file of its folder.
    #[error("{}: file \"{}\": {}", printable(.path), printable(.entry), printable(.problem))]
    OutsideFolder {
        /// The folder, or the index that names the file.
        path: String,
        /// The file.
        entry: String,
        /// The problem with it.
        problem: String,
    },
    /// A file ended before a tensor did: it has shrunk since it was opened.
    #[error("{}: tensor {}: expected {expected} bytes at offset {offset}, the file ends before them", printable(.path), printable(.tensor))]
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
    #[error("{}: tensor {} is missing; expected {}", printable(.path), printable(.tensor), printable(.expected))]
    Missing {
        /// The file or folder.
        path: String,
        /// Name of the tensor on disk.
        tensor: String,
        /// Requirement.
        expected: String,
    },
    /// The block holds a tensor that its family does not have.
    #[error("{}: unexpected tensor {} ({}); {} has none of this name", printable(.path), printable(.tensor), printable(.found), printable(.family))]
    Unexpected {
        /// The file or folder.
        path: String,
        /// Name of the tensor on disk.
        tensor: String,
        /// Value that is there.
        found: String,
        /// The family.
        family: String,
    },
    /// A tensor is of another shape or type.
    #[error("{}: tensor {}: expected {}, found {}", printable(.path), printable(.tensor), printable(.expected), printable(.found))]
    Tensor {
        /// The file or folder.
        path: String,
        /// Name of the tensor on disk.
        tensor: String,
        /// Requirement.
        expected: String,
        /// Value that is there.
        found: String,
    },
    /// A declaration of `config.json` or `hf_quant_config.json` about the weights is not so.
    #[error("{}: field {}: expected {}, found {}", printable(.path), printable(.field), printable(.expected), printable(.found))]
    Declaration {
        /// The file.
        path: String,
        /// JSON key.
        field: String,
        /// Values that it may have, and the experts that make it so.
        expected: String,
        /// Value that it has.
        found: String,
    },
    /// A save would replace the checkpoint that it reads.
    #[error("{}: is the checkpoint that is read ({}); save to another folder{}", printable(.path), printable(.source_dir), if *.allowed { ", or say SaveOptions::replace_source" } else { "" })]
    OwnSource {
        /// The folder to save to.
        path: String,
        /// The folder that is read.
        source_dir: String,
        /// Whether an option allows it.
        allowed: bool,
    },
    /// Another save into the folder is under way.
    #[error("{}: another save into this folder is under way", printable(.path))]
    Busy {
        /// The folder.
        path: String,
    },
}
