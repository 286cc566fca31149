//! A case: what is wrong, on which ranks, and what each of them is to find.

use std::error::Error as StdError;
use std::path::Path;
use std::thread;
use std::time::Duration;

use moebius::candle::error_of;
use moebius::cpu::ThreadWorld;
use moebius::{CommError, Error as LayerError};
use moebius_models::Error;
use moebius_models::generate::Error as TextError;
use tempfile::TempDir;

use crate::chat_folder::{chat_folder, tokenizer_json};
use crate::jobs::{Link, Outcome, loads_and_runs, talks};

/// Longer than any case takes: what ends by it was waited for.
const TIMEOUT: Duration = Duration::from_secs(120);
const RANKS: usize = 2;
/// Ranks that have it wrong.
pub const EVERYWHERE_OR_ON_ONE: [[bool; RANKS]; 3] = [[true, true], [true, false], [false, true]];

/// What is wrong.
pub struct Case {
    name: &'static str,
    /// Makes the folder wrong, on the ranks that have it so.
    spoil: fn(&Path),
    /// What a rank does, from a folder; `true` where it is to do it wrongly.
    job: fn(&Path, Link, bool) -> Outcome,
    /// What the error of a rank names that finds the fault by itself.
    words: &'static str,
    /// Both ranks find it by themselves, though it is wrong on one alone: by comparing what they have.
    compared: bool,
}

fn nothing(_: &Path) {}

impl Case {
    /// Of a folder that is loaded, or not.
    pub const fn of_folder(name: &'static str, spoil: fn(&Path), words: &'static str) -> Self {
        Self { name, spoil, job: loads_and_runs, words, compared: false }
    }

    /// Of folders that are right by themselves.
    pub const fn of_two_folders(name: &'static str, spoil: fn(&Path), words: &'static str) -> Self {
        Self { compared: true, ..Self::of_folder(name, spoil, words) }
    }

    pub const fn of_call(name: &'static str, job: fn(&Path, Link, bool) -> Outcome, words: &'static str) -> Self {
        Self { name, spoil: nothing, job, words, compared: false }
    }

    pub const fn of_texts(name: &'static str, spoil: fn(&Path), words: &'static str) -> Self {
        Self { name, spoil, job: talks, words, compared: false }
    }

    /// What becomes of the ranks where these have it wrong.
    pub fn outcomes(&self, wrong: [bool; RANKS]) -> Vec<Outcome> {
        let folders: Vec<TempDir> = wrong.iter().map(|_| chat_folder(&tokenizer_json(false))).collect();
        let spoiled = folders.iter().zip(wrong).filter(|(_, wrong)| *wrong);
        spoiled.for_each(|(folder, _)| (self.spoil)(folder.path()));
        let worlds = ThreadWorld::create(RANKS, TIMEOUT).into_iter().zip(ThreadWorld::create(RANKS, TIMEOUT));
        thread::scope(|scope| {
            let threads: Vec<_> = worlds
                .zip(folders.iter().zip(wrong))
                .map(|((experts, steps), (folder, wrong))| {
                    scope.spawn(move || (self.job)(folder.path(), Link { experts, steps }, wrong))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| panic!("{}: panicked", self.name)))
                .collect()
        })
    }

    pub fn hold(&self, wrong: [bool; RANKS]) {
        for (rank, outcome) in self.outcomes(wrong).into_iter().enumerate() {
            let at = format!("{}, wrong on {wrong:?}, rank {rank}", self.name);
            let Err(error) = outcome else { panic!("{at}: no error") };
            let (text, own) = (error.to_string(), wrong[rank] || self.compared);
            assert!(is_typed(&*error), "{at}: {error:?}");
            assert!(!is_late(&*error), "{at}: timed out: {text}");
            assert!(!own || text.contains(self.words), "{at}: {text}");
            assert!(own || is_told(&*error), "{at}: {error:?}");
            assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{at}: {text:?}");
        }
    }
}

/// An error of this crate's or of the layer's, and no text alone.
fn is_typed(error: &(dyn StdError + 'static)) -> bool {
    error.is::<Error>() || error.is::<TextError>() || error.is::<LayerError>()
}

fn of_layer<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a LayerError> {
    match error.downcast_ref() {
        Some(TextError::Model(Error::Moebius(error))) => return Some(error),
        Some(TextError::Model(Error::Candle(error)) | TextError::Candle(error)) => return error_of(error),
        _ => {}
    }
    match error.downcast_ref() {
        Some(Error::Moebius(error)) => Some(error),
        Some(Error::Candle(error)) => error_of(error),
        _ => error_of(error),
    }
}

/// What a rank has of another one's failure.
fn is_told(error: &(dyn StdError + 'static)) -> bool {
    use CommError::{PeerGone, Refused};
    matches!(of_layer(error), Some(LayerError::Peer { .. } | LayerError::Comm(PeerGone { .. } | Refused { .. })))
}

fn is_late(error: &(dyn StdError + 'static)) -> bool {
    matches!(of_layer(error), Some(LayerError::Comm(CommError::Timeout { .. } | CommError::Poisoned { .. })))
}
