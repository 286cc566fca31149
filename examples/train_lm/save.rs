//! The state of a run, as its ranks leave it together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moebius::comm::{Op, Tag};

use crate::Failure;
use crate::lm::{Settings, initial};
use crate::rank_results::RankResults;
use crate::ranks::Peer;
use crate::state;

/// A rank whose state is saved.
pub trait SavedRank: Peer {
    /// This rank's part of each parameter.
    fn weights(&self) -> Result<BTreeMap<String, Vec<f32>>, Failure>;

    /// Writes the optimizer's state with all ranks; the first one alone goes by the folder.
    fn save_optimizer(&mut self, dir: &Path) -> Result<(), Failure>;
}

/// Leaves the state after so many steps in a folder, which every rank calls. One that fails fails it on all.
pub fn save(
    rank: &mut impl SavedRank,
    (settings, number): (&Settings, usize),
    dir: &Path,
    steps: usize,
) -> Result<(), Failure> {
    let tag = Tag { layer: 0, op: Op::User, sequence: steps as u64 };
    // Before the optimizers of all ranks meet, and behind what one rank alone does.
    let (save, begun) = match (number == 0).then(|| state::Save::begin(dir)).transpose() {
        Ok(save) => (save, Ok(())),
        Err(error) => (None, Err(error.into())),
    };
    agreed(rank, tag, begun)?;
    let written = write(rank, (settings, save), steps, tag);
    agreed(rank, tag, written)
}

/// A rank's result, or that of another rank which has failed.
fn agreed(rank: &mut impl SavedRank, tag: Tag, own: Result<(), Failure>) -> Result<(), Failure> {
    let text = own.as_ref().map_or_else(ToString::to_string, |()| String::new());
    let gathered = rank.gather(tag, text.as_bytes())?;
    own?;
    match gathered.iter().enumerate().find(|(_, text)| !text.is_empty()) {
        Some((rank, text)) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(text)).into()),
        None => Ok(()),
    }
}

/// Writes the state: the rank that has the save does, from what all have.
fn write(
    rank: &mut impl SavedRank,
    (settings, save): (&Settings, Option<state::Save>),
    steps: usize,
    tag: Tag,
) -> Result<(), Failure> {
    let mut own = RankResults::default();
    for (name, values) in rank.weights()? {
        own.put(name, &[values.len()], values.into_iter().map(f64::from));
    }
    let gathered = rank.gather(tag, &own.pack()?)?;
    rank.save_optimizer(&save.as_ref().map_or_else(PathBuf::new, state::Save::optimizer))?;
    let Some(save) = save else { return Ok(()) };
    let ranks = gathered.iter().map(|bytes| RankResults::unpack(bytes)).collect::<Result<Vec<_>, _>>()?;
    let mut weights = BTreeMap::new();
    for param in initial(settings) {
        let part = |rank: &RankResults| -> Result<Vec<f32>, Failure> {
            Ok(rank.get(&param.name)?.1.iter().map(|v| *v as f32).collect())
        };
        let parts = ranks.iter().map(part).collect::<Result<Vec<_>, _>>()?;
        weights.insert(param.name.clone(), state::whole(settings.mesh, &param, &parts));
    }
    save.finish(settings, steps, &weights)
}
