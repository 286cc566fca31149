//! Bad input over two ranks, on one of them or on both: a typed error on every rank, told and not timed out.

mod calls;
mod case;
#[path = "../support/chat_folder.rs"]
mod chat_folder;
mod folders;
mod jobs;
mod texts;
