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
    // All that a rank does by itself comes first, so that all ranks are in the same collective.
    let begun = (number == 0).then(|| state::Save::begin(dir)).transpose().map_err(Failure::from);
    let begun = begun.and_then(|save| Ok((save, packed(rank)?)));
    let (save, weights) = agreed(rank, tag(steps, 0), begun)?;
    let written = write(rank, (settings, save), steps, &weights);
    agreed(rank, tag(steps, 2), written)
}

/// Tag of a save's collectives, by their number in it.
fn tag(steps: usize, number: u64) -> Tag {
    Tag { layer: 0, op: Op::Weights, sequence: 3 * steps as u64 + number }
}

/// A rank's result, or that of another rank which has failed.
fn agreed<T>(rank: &mut impl SavedRank, tag: Tag, own: Result<T, Failure>) -> Result<T, Failure> {
    let text = own.as_ref().map_or_else(ToString::to_string, |_| String::new());
    let gathered = rank.gather(tag, text.as_bytes())?;
    let own = own?;
    match gathered.iter().enumerate().find(|(_, text)| !text.is_empty()) {
        Some((rank, text)) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(text)).into()),
        None => Ok(own),
    }
}

/// This rank's weights, as they travel.
fn packed(rank: &impl SavedRank) -> Result<Vec<u8>, Failure> {
    let mut own = RankResults::default();
    for (name, values) in rank.weights()? {
        own.put(name, &[values.len()], values.into_iter().map(f64::from));
    }
    own.pack()
}

/// Writes the state: the rank that has the save does, from what all have.
fn write(
    rank: &mut impl SavedRank,
    (settings, save): (&Settings, Option<state::Save>),
    steps: usize,
    weights: &[u8],
) -> Result<(), Failure> {
    let gathered = rank.gather(tag(steps, 1), weights)?;
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
