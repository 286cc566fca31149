//! A run's state on disk, from which any number of ranks goes on:
//!
//! ```text
//! training.json            of which run it is, after how many steps, and which of the two folders has it
//! state-0/ or state-1/     weights.safetensors, the whole parameters, and optimizer/, what is kept beside them
//! ```
//!
//! A save fills the folder that `training.json` does not name, and then renames a new `training.json` into place. That is
//! the one step in which the state changes: whatever is killed when, the folder holds the old state or the new one.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use moebius::ep::DispatcherKind;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};

use crate::Failure;
use crate::lm::{Param, Settings, initial, is_share};
use crate::mesh::Mesh;

const RUN: &str = "training.json";
const NEW_RUN: &str = "training.json.new";
/// Field of it.
const DISPATCHER: &str = "dispatcher";
const WEIGHTS: &str = "weights.safetensors";
const FOLDERS: [&str; 2] = ["state-0", "state-1"];
/// The field of `training.json` that names one.
const FOLDER: &str = "folder";

/// Why a run cannot go on from a state.
#[derive(Debug)]
pub enum StateError {
    /// A file cannot be read or written.
    Io { path: PathBuf, error: io::Error },
    /// A file is not what it should be.
    Damaged { path: PathBuf, reason: String },
    /// It is that of another model, or of another training of it.
    OtherRun { path: PathBuf, field: &'static str, expected: String, found: String },
    /// Its parts are from different steps.
    OtherStep { path: PathBuf, weights: u64, optimizer: u64 },
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, error } => write!(f, "{}: {error}", path.display()),
            Self::Damaged { path, reason } => write!(f, "{}: {reason}", path.display()),
            Self::OtherRun { path, field, expected, found } => {
                write!(f, "{}: the state of another run: {field}: expected {expected}, found {found}", path.display())
            }
            Self::OtherStep { path, weights, optimizer } => {
                let path = path.display();
                write!(f, "{path}: weights after step {weights}, but an optimizer after step {optimizer}")
            }
        }
    }
}

impl Error for StateError {}

/// The identity of a run: numbers that decide the bits of its steps, whatever the ranks.
pub fn run(settings: &Settings) -> [(&'static str, String); 18] {
    let s = settings;
    [
        ("seed", s.seed.to_string()),
        ("steps", s.steps.to_string()),
        ("batch", s.batch.to_string()),
        ("context", s.context.to_string()),
        ("hidden", s.hidden.to_string()),
        ("heads", s.heads.to_string()),
        ("layers", s.layers.to_string()),
        ("experts", s.experts.to_string()),
        ("top_k", s.top_k.to_string()),
        ("intermediate", s.intermediate.to_string()),
        ("balance", s.balance.to_string()),
        ("learning_rate", s.learning_rate.to_string()),
        ("clip", s.clip.map_or("none".to_string(), |clip| clip.to_string())),
        ("layer_dtype", s.layer_dtype.as_str().to_string()),
        ("microbatches", s.microbatches.to_string()),
        ("shard_payload", format!("{:?}", s.shard_payload)),
        ("token_payload", format!("{:?}", s.token_payload)),
        ("text", format!("{:016x}", s.text)),
    ]
}

/// The same in a line, for what is kept beside the weights.
pub fn identity(settings: &Settings) -> String {
    run(settings).map(|(field, value)| format!("{field} {value}")).join(", ")
}

fn read(path: PathBuf) -> Result<Vec<u8>, StateError> {
    std::fs::read(&path).map_err(|error| StateError::Io { path, error })
}

fn saved_run(dir: &Path) -> Result<Value, StateError> {
    let path = dir.join(RUN);
    let bytes = read(path.clone())?;
    serde_json::from_slice(&bytes).map_err(|e| StateError::Damaged { path, reason: e.to_string() })
}

/// The folder of the state that counts.
fn folder(dir: &Path) -> Result<&'static str, StateError> {
    let saved = saved_run(dir)?;
    let named = saved.get(FOLDER).and_then(Value::as_str);
    let known = FOLDERS.into_iter().find(|folder| Some(*folder) == named);
    known.ok_or_else(|| StateError::Damaged { path: dir.join(RUN), reason: format!("{FOLDER}: none of {FOLDERS:?}") })
}

/// A saved run.
#[derive(Debug)]
pub struct Saved {
    /// Steps that it has made.
    pub steps: usize,
    /// How its tokens traveled, where that was timed or named: another dispatcher sums in another order.
    pub dispatcher: Option<DispatcherKind>,
}

/// What a folder says of the run that left it.
///
/// # Errors
/// The state of another run than that of these settings, or none.
pub fn saved(dir: &Path, settings: &Settings) -> Result<Saved, StateError> {
    let path = dir.join(RUN);
    let damaged = |reason: String| StateError::Damaged { path: path.clone(), reason };
    let saved = saved_run(dir)?;
    for (field, expected) in run(settings) {
        let found = saved.get(field).and_then(Value::as_str).unwrap_or("nothing").to_string();
        if found != expected {
            return Err(StateError::OtherRun { path, field, expected, found });
        }
    }
    let steps = saved.get("step").and_then(Value::as_u64).and_then(|step| usize::try_from(step).ok());
    let steps = steps.ok_or_else(|| damaged("no number of steps".to_string()))?;
    let dispatcher = saved.get(DISPATCHER).map(|name| {
        let kind = name.as_str().unwrap_or_default().parse::<DispatcherKind>();
        kind.map_err(|error| damaged(error.to_string()))
    });
    Ok(Saved { steps, dispatcher: dispatcher.transpose()? })
}

/// The parameters that a run begins with.
///
/// # Errors
/// Those of a state, where it goes on from one.
pub fn params(settings: &Settings) -> Result<Vec<Param>, StateError> {
    let mut params = initial(settings);
    let Some(dir) = &settings.resume else { return Ok(params) };
    let path = dir.join(folder(dir)?).join(WEIGHTS);
    let damaged = |reason: String| StateError::Damaged { path: path.clone(), reason };
    let bytes = read(path.clone())?;
    let saved = SafeTensors::deserialize(&bytes).map_err(|e| damaged(e.to_string()))?;
    for param in &mut params {
        let view = saved.tensor(&param.name).map_err(|e| damaged(e.to_string()))?;
        if view.dtype() != Dtype::F32 || view.shape() != param.dims {
            let found = format!("{:?} {:?}", view.dtype(), view.shape());
            return Err(damaged(format!("{}: expected F32 {:?}, found {found}", param.name, param.dims)));
        }
        param.values = view.data().as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect();
    }
    Ok(params)
}

/// Refuses an optimizer that is not of the weights' step.
pub fn check_step(dir: &Path, weights: usize, optimizer: u64) -> Result<(), StateError> {
    let weights = weights as u64;
    match weights == optimizer {
        true => Ok(()),
        false => Err(StateError::OtherStep { path: dir.to_path_buf(), weights, optimizer }),
    }
}

/// Where the optimizer's state is.
///
/// # Errors
/// There is no state.
pub fn optimizer(dir: &Path) -> Result<PathBuf, StateError> {
    Ok(dir.join(folder(dir)?).join("optimizer"))
}

/// A whole parameter from what the ranks hold of it.
pub fn whole(mesh: Mesh, param: &Param, parts: &[Vec<f32>]) -> Vec<f32> {
    if !is_share(&param.name) {
        return parts[0].clone();
    }
    let mut whole = Vec::with_capacity(param.values.len());
    for p in 0..mesh.ep {
        for n in 0..mesh.shards() {
            whole.extend_from_slice(&parts[mesh.rank(p, n, 0)]);
        }
        // Padding is at the end of what the ranks hold.
        whole.truncate((p + 1) * param.values.len() / mesh.ep);
    }
    whole
}

/// A save under way: of the rank that writes.
pub struct Save {
    dir: PathBuf,
    /// The folder that the state is written to.
    new: &'static str,
    /// The one that counts, if any does.
    old: Option<&'static str>,
}

impl Save {
    /// Makes the folders, and removes what a save that did not come to its end has left.
    ///
    /// # Errors
    /// A folder that cannot be made or cleaned.
    pub fn begin(dir: &Path) -> Result<Self, StateError> {
        let at = |path: PathBuf| move |error| StateError::Io { path, error };
        std::fs::create_dir_all(dir).map_err(at(dir.to_path_buf()))?;
        // Whether a state is there that nothing leads to: it may be whole, and stays until the save after this one.
        let (old, unknown) = match folder(dir) {
            Ok(folder) => (Some(folder), false),
            Err(StateError::Damaged { .. }) => (None, true),
            Err(StateError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => (None, false),
            Err(error) => return Err(error),
        };
        let new = FOLDERS.into_iter().find(|folder| match old {
            Some(old) => old != *folder,
            None => !unknown || !dir.join(folder).exists(),
        });
        let new = new.unwrap_or(FOLDERS[0]);
        let leftovers = FOLDERS.into_iter().filter(|folder| *folder == new || old.is_none() && !unknown);
        for leftover in leftovers {
            remove(&dir.join(leftover), |path| std::fs::remove_dir_all(path))?;
        }
        let folder = dir.join(new);
        remove(&dir.join(NEW_RUN), |path| std::fs::remove_file(path))?;
        kill_point("cleaned")?;
        std::fs::create_dir(&folder).map_err(at(folder.clone()))?;
        kill_point("a folder made")?;
        Ok(Self { dir: dir.to_path_buf(), new, old })
    }

    /// Where the optimizer's state is to be written, before [`finish`](Self::finish).
    pub fn optimizer(&self) -> PathBuf {
        self.dir.join(self.new).join("optimizer")
    }

    /// Writes weights and what they are of, and has the new state count.
    ///
    /// # Errors
    /// A file that cannot be written: the state before stays.
    pub fn finish(self, settings: &Settings, step: usize, weights: &BTreeMap<String, Vec<f32>>) -> Result<(), Failure> {
        let params = initial(settings);
        let bytes = |values: &Vec<f32>| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let all: BTreeMap<&String, Vec<u8>> = weights.iter().map(|(name, values)| (name, bytes(values))).collect();
        let view = |param: &Param| -> Result<_, Failure> {
            let bytes = all.get(&param.name).ok_or_else(|| format!("no weights of {}", param.name))?;
            Ok((param.name.clone(), TensorView::new(Dtype::F32, param.dims.clone(), bytes)?))
        };
        let weights = serialize(params.iter().map(view).collect::<Result<Vec<_>, Failure>>()?, None)?;
        let mut of: serde_json::Map<String, Value> =
            run(settings).into_iter().map(|(field, value)| (field.to_string(), Value::String(value))).collect();
        of.insert("step".to_string(), json!(step));
        // A rank alone has had no choice, and decides nothing for several.
        let chosen = settings.dispatcher.filter(|kind| !matches!(kind, DispatcherKind::Auto | DispatcherKind::Local));
        if let Some(kind) = chosen {
            of.insert(DISPATCHER.to_string(), json!(kind.name()));
        }
        of.insert(FOLDER.to_string(), json!(self.new));
        kill_point("an optimizer written")?;
        let folder = self.dir.join(self.new);
        write(folder.join(WEIGHTS), &weights)?;
        sync(&folder).map_err(|error| StateError::Io { path: folder, error })?;
        kill_point("weights written")?;
        write(self.dir.join(NEW_RUN), &serde_json::to_vec_pretty(&of)?)?;
        kill_point("a run written")?;
        let run = self.dir.join(RUN);
        let renamed = std::fs::rename(self.dir.join(NEW_RUN), &run).and_then(|()| sync(&self.dir));
        renamed.map_err(|error| StateError::Io { path: run, error })?;
        kill_point("the new state counts")?;
        if let Some(old) = self.old {
            // The new state counts; what cannot be removed now is at the next save's beginning.
            let _ = std::fs::remove_dir_all(self.dir.join(old));
        }
        Ok(())
    }
}

/// Waits until the names in a folder are on the disk.
#[cfg(unix)]
fn sync(dir: &Path) -> io::Result<()> {
    std::fs::File::open(dir)?.sync_all()
}

/// Folders cannot be synchronized elsewhere.
#[cfg(not(unix))]
fn sync(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Writes a file, and waits until it is on the disk: it is there before what names it.
fn write(path: PathBuf, bytes: &[u8]) -> Result<(), StateError> {
    let written = std::fs::File::create(&path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| StateError::Io { path, error })
}

/// Removes what may not be there.
fn remove(path: &Path, how: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), StateError> {
    match how(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(StateError::Io { path: path.to_path_buf(), error })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
thread_local! {
    /// Points of a save until a test ends it there, as a kill would.
    pub static POINTS_LEFT: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
}

/// Such a point.
#[cfg(test)]
fn kill_point(name: &str) -> Result<(), StateError> {
    let left = POINTS_LEFT.get().saturating_sub(1);
    POINTS_LEFT.set(left);
    match left {
        0 => Err(StateError::Io { path: PathBuf::from(name), error: io::Error::other("killed") }),
        _ => Ok(()),
    }
}

#[cfg(not(test))]
fn kill_point(_: &str) -> Result<(), StateError> {
    Ok(())
}
