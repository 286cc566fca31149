//! The layer as a burn module.
