//! Ranks that are processes: identity, bootstrap, mesh, launcher.

mod bootstrap;
mod identity;
#[cfg(target_os = "linux")]
mod launcher;
mod mesh;
mod strangers;
