//! Ranks that are processes: identity, bootstrap, mesh, launcher.

mod bootstrap;
mod identity;
#[cfg(target_os = "linux")]
mod launcher;
#[path = "../common/limits.rs"]
mod limits;
mod mesh;
mod strangers;
