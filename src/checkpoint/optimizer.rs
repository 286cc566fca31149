//! An optimizer's state on disk: a folder with `config.json`, which counts the steps, and tensors of the whole
//! parameters, so that any number of ranks can go on from it.
//!
//! Of a parameter `p` there are `p.exp_avg` and `p.exp_avg_sq`, its moments, and `p.main`, its main weight, where the
//! parameter itself is in 16 bits. A save changes the folder as one, as that of a model does.

use std::io::Write;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Value, json};

use super::commit::Save;
use super::folder::{CONFIG, Folder, INDEX, QUANTIZATION, SINGLE};
use super::json::{MAX_CONFIG, config_error, io_error, parse_value, read_limited};
use super::optimizer_state::{KIND, Saved, StateItem, VERSION, identity_text, state_items};
use super::rank_params::BARRIER_BYTES;
use super::stored::on_disk;
use super::{OpenOptions, header};
use crate::comm::refusal::refuse_on_error;
use crate::comm::{Exchange, Op, Tag};
use crate::compare::{ComparedField, compare_fields, gather_numbers, gather_texts};
use crate::dtype::DType;
use crate::error::{CheckpointError, CommError, Error, Result};
use crate::fnv1a::fnv1a;
use crate::optim::{AdamW, Counts, StateKind, StepDevice};
use crate::tensor::{Tensor, TensorMut, TensorRef};

const CALL: &str = "AdamW";
/// Bytes that are on the host, and on their way between ranks, at a time.
const HOST_BYTES: usize = 64 << 20;

impl<D: StepDevice> AdamW<D> {
    /// Writes the state to a folder of its own, made where there is none: main weights of 16-bit parameters, moments,
    /// and counts; options are not part of it. Whatever is killed when, the folder holds the old state or the new one,
    /// whole. Every rank calls it, and the first one writes, with 64 MiB of another rank's at a time. Waits for the
    /// device.
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] for ranks with other [identities](Self::set_identity), or with other moments of a parameter
    /// that they hold whole (of its first 1024 elements), before anything is written, and so a state that
    /// [`load`](Self::load) has left half read; a folder that holds another checkpoint, by its config.json (also one that is
    /// a link) or by files of weights without one; [`CheckpointError`] where writing fails; all on every rank. A
    /// collective's.
    pub fn save(&mut self, dir: impl AsRef<Path>) -> Result<()> {
        let dir = dir.as_ref();
        self.agree_on_identity()?;
        let checked = self.check_defined().and_then(|()| if self.rank() == 0 { check_target(dir) } else { Ok(()) });
        let alone = self.comm().is_none_or(|comm| comm.size() == 1);
        let hashes = checked.and_then(|()| if alone { Ok(Vec::new()) } else { self.hashes_of_whole() });
        let hashes = self.exchange_check(hashes)?;
        self.agree_on_whole(&hashes)?;
        let result = self.write_state(dir);
        self.exchange_outcome(result)
    }

    fn write_state(&mut self, dir: &Path) -> Result<()> {
        let counts = self.counts()?;
        let (header, items) = plan(state_items(self))?;
        let writes = self.rank() == 0;
        if !writes {
            let mut alone = 0;
            return items.iter().try_for_each(|item| self.send(item, None, &mut alone));
        }
        let config = json!({
            "model_type": KIND,
            "identity": self.identity(),
            "version": VERSION,
            "steps": counts.steps,
            "skipped": counts.skipped,
            "good_steps": counts.good,
            "loss_scaling": counts.scaled,
            // As text, since JSON's numbers are rounded where they are read.
            "loss_scale": format!("{:?}", counts.scale),
        });
        let mut save = Save::begin(dir)?;
        save.file(SINGLE, |out| {
            write(dir, out, &header)?;
            let mut alone = 0;
            items.iter().try_for_each(|item| self.send(item, Some((dir, out)), &mut alone))
        })?;
        let text = serde_json::to_vec_pretty(&config).map_err(|e| io_error(dir, e))?;
        save.file(CONFIG, |out| write(dir, out, &text))?;
        save.finish()
    }

    /// Brings a tensor to the first rank, which writes it. `alone`: bytes that it has written since the ranks met, the
    /// same on all of them, which wait for it.
    fn send(&mut self, item: &StateItem, mut out: Option<(&Path, &mut dyn Write)>, alone: &mut usize) -> Result<()> {
        let rank = self.rank();
        let owners = self.owners(item.param)?;
        for (owner, rows) in owners {
            let width = self.specs()[item.param].shard.width();
            let bytes = rows.len() * width * item.dtype.size();
            for start in (0..bytes).step_by(HOST_BYTES) {
                let len = HOST_BYTES.min(bytes - start);
                let own = (rank == owner).then_some(start..start + len);
                let chunk = self.fetch(item, owner, own, len)?;
                if let Some((dir, out)) = &mut out {
                    write(dir, *out, &chunk)?;
                }
                *alone = if owner == 0 { *alone + len } else { 0 };
                if *alone >= BARRIER_BYTES {
                    *alone = 0;
                    self.comm().filter(|comm| comm.size() > 1).map_or(Ok(()), |comm| comm.barrier(TAG))?;
                }
            }
        }
        Ok(())
    }

    /// Bytes of the owner's part of a tensor, on the first rank; elsewhere nothing.
    fn fetch(
        &mut self,
        item: &StateItem,
        owner: usize,
        own: Option<std::ops::Range<usize>>,
        len: usize,
    ) -> Result<Vec<u8>> {
        let rank = self.rank();
        let device = self.device().clone();
        if owner == 0 {
            return match own {
                None => Ok(Vec::new()),
                Some(range) => {
                    let view = self.state_bytes(item, range)?;
                    device.download(view)
                }
            };
        }
        // A copy, as the communicator and the state are both this optimizer's.
        let mut send = Tensor::empty(&device, DType::U8, &[own.as_ref().map_or(0, |_| len)])?;
        if let Some(range) = own {
            device.copy(self.state_bytes(item, range)?.data(), send.view_mut().into_data())?;
        }
        let mut recv = Tensor::empty(&device, DType::U8, &[if rank == 0 { len } else { 0 }])?;
        let streams = self.streams();
        let Some(comm) = self.comm() else { return Ok(Vec::new()) };
        let ranks = comm.size();
        let only = |at: usize, here: bool| -> Vec<usize> {
            (0..ranks).map(|r| if here && r == at { len } else { 0 }).collect()
        };
        let (send_bytes, recv_bytes) = (only(0, rank == owner), only(owner, rank == 0));
        let exchange = Exchange {
            send: send.view(),
            send_bytes: &send_bytes,
            recv: recv.view_mut(),
            recv_bytes: &recv_bytes,
            dtype: item.dtype,
        };
        streams.run_on_transfer(|| comm.all_to_all_v(TAG, exchange))?;
        if rank == 0 { device.download(recv.view()) } else { Ok(Vec::new()) }
    }

    /// Bytes of this rank's part of a tensor.
    fn state_bytes(&self, item: &StateItem, range: std::ops::Range<usize>) -> Result<TensorRef<'_, D>> {
        let missing = || Error::invalid(CALL, &item.name, "a tensor", "none");
        let view = self.state_tensor(item.param, item.kind).ok_or_else(missing)?.view();
        let len = range.len();
        TensorRef::new(D::slice(view.data(), range), DType::U8, &[len])
    }

    /// Goes on from a saved state, whichever ranks and cuts it was saved with; gives the number of steps it has taken.
    /// Parameters of 16 bits are to be set by [`write_param`](Self::write_param) then. Moments that were saved in bf16
    /// are taken as f32 too; the other way they are refused. The loss's factor is taken where these options scale the
    /// loss too, within their bounds; else it is theirs. Every rank calls it.
    ///
    /// # Errors
    /// A folder that holds something else, or the state of other parameters or of another
    /// [identity](Self::set_identity), before anything has changed, on every rank, whose communicator works on;
    /// [`CheckpointError`] where reading fails, or a main weight or moment is NaN or infinite, or a second moment negative,
    /// on every rank, after which no step is taken, and nothing saved, until a load succeeds.
    pub fn load(&mut self, dir: impl AsRef<Path>) -> Result<u64> {
        self.load_state(dir.as_ref(), None, Ok(()))
    }

    /// The same of the state of a model that has taken `steps` steps, as whoever saved both has written down.
    ///
    /// # Errors
    /// As [`load`](Self::load); before anything has changed, the state of another step.
    pub fn load_at(&mut self, dir: impl AsRef<Path>, steps: u64) -> Result<u64> {
        self.load_state(dir.as_ref(), Some(steps), Ok(()))
    }

    /// [`load`](Self::load), or [`load_at`](Self::load_at) where the steps are known. `able`: whether this rank can take
    /// the state, which the others hear of before anything has changed.
    pub(crate) fn load_state(&mut self, dir: &Path, steps: Option<u64>, able: Result<()>) -> Result<u64> {
        let checked = able.and_then(|()| Saved::open(dir)).and_then(|saved| {
            saved.check_identity(self.identity())?;
            saved.check_steps(steps)?;
            let items = saved.check(self)?;
            Ok((saved, items))
        });
        let (saved, items) = self.exchange_check(checked)?;
        self.agree(&saved.counts)?;
        self.read_state(&saved, &items)
    }

    fn read_state(&mut self, saved: &Saved, items: &[StateItem]) -> Result<u64> {
        self.set_undefined(true);
        let read = items.iter().try_for_each(|item| self.read_item(saved, item));
        self.exchange_check(read)?;
        let counts = self.adopted(&saved.counts);
        self.restart(&counts)?;
        self.set_undefined(false);
        Ok(counts.steps)
    }

    fn read_item(&mut self, saved: &Saved, item: &StateItem) -> Result<()> {
        let shard = self.specs()[item.param].shard.clone();
        let Some(entry) = saved.files.get(&item.name).cloned() else { return Ok(()) };
        let widen = entry.dtype == Dtype::BF16 && item.dtype == DType::F32;
        let on_disk = if widen { DType::BF16.size() } else { item.dtype.size() };
        let (first, count) = (shard.rows().start * shard.width(), shard.count());
        let device = self.device().clone();
        let step = HOST_BYTES / item.dtype.size();
        let mut buffer = Vec::new();
        for at in (0..count).step_by(step) {
            let len = step.min(count - at);
            buffer.resize(len * on_disk, 0);
            saved.files.read(&item.name, &entry, ((first + at) * on_disk) as u64, &mut buffer)?;
            let bytes = if widen { widened(&buffer) } else { std::mem::take(&mut buffer) };
            if let Some((i, found)) = first_unusable(item, &bytes) {
                return Err(saved.refused_element(item, first + at + i, found));
            }
            let Some(tensor) = self.state_tensor_mut(item.param, item.kind) else { continue };
            let place = at * item.dtype.size()..(at + len) * item.dtype.size();
            let to = D::slice_mut(tensor.view_mut().into_data(), place);
            device.upload(&bytes, TensorMut::new(to, DType::U8, &[bytes.len()])?)?;
        }
        Ok(())
    }

    /// What this rank has found where nothing is under way, of which all ranks hear: those that have found nothing
    /// get the error of the first that has, as its refusal. Since all of them are here, nobody refuses, and the communicator
    /// survives on every transport.
    fn exchange_check<T>(&mut self, checked: Result<T>) -> Result<T> {
        let (rank, streams) = (self.rank(), self.streams());
        let Some(comm) = self.comm().filter(|comm| comm.size() > 1) else { return checked };
        let own = checked.as_ref().err().map_or_else(String::new, Error::to_string);
        let errors = gather_texts(&streams.transfer, comm, TAG, &own)?;
        let value = checked?;
        match errors.into_iter().enumerate().find(|(_, error)| !error.is_empty()) {
            None => Ok(value),
            Some((peer, reason)) => Err(CommError::Refused { operation: CALL, tag: TAG, rank, peer, reason }.into()),
        }
    }

    /// A rank's outcome, which the others hear of: those that have not failed get its error.
    fn exchange_outcome<T>(&mut self, outcome: Result<T>) -> Result<T> {
        let Some(comm) = self.comm().filter(|comm| comm.size() > 1) else { return outcome };
        match outcome {
            // Which the others have heard of, each in a collective of its own.
            Err(Error::Comm(e)) => Err(Error::Comm(e)),
            // They wait in the next collective, whichever it is.
            Err(e) => refuse_on_error(comm, TAG, Err(e)),
            Ok(value) => comm.barrier(TAG).map(|()| value),
        }
    }

    /// Refuses ranks that say of the state that it is another model's.
    fn agree_on_identity(&mut self) -> Result<()> {
        let own = identity_text(self.identity());
        let (rank, streams) = (self.rank(), self.streams());
        let Some(comm) = self.comm().filter(|comm| comm.size() > 1) else { return Ok(()) };
        let theirs = gather_texts(&streams.transfer, comm, TAG, &own)?;
        match theirs.into_iter().enumerate().find(|(_, theirs)| *theirs != own) {
            None => Ok(()),
            Some((peer, peer_value)) => {
                let field = "identity".to_string();
                Err(Error::ConfigMismatch { call: CALL, field, rank, value: own, peer, peer_value })
            }
        }
    }

    /// A hash of the first moment's first elements, of each parameter that this rank holds whole.
    fn hashes_of_whole(&self) -> Result<Vec<u64>> {
        let hash = |item: &StateItem| {
            let shard = &self.specs()[item.param].shard;
            let count = shard.count().min(COMPARED_ELEMENTS);
            if shard.rows() != (0..shard.all_rows()) || count == 0 {
                return Ok(NO_HASH);
            }
            let bytes = self.device().download(self.state_bytes(item, 0..count * item.dtype.size())?)?;
            // Not that of no hash.
            Ok(fnv1a(&bytes) | 1)
        };
        state_items(self).iter().filter(|item| item.kind == StateKind::First).map(hash).collect()
    }

    /// Refuses parameters that ranks hold whole, and of which they have other moments: such as experts that were not named as
    /// parts, of which a save would keep the first rank's for all.
    fn agree_on_whole(&mut self, hashes: &[u64]) -> Result<()> {
        let (rank, streams) = (self.rank(), self.streams());
        let Some(comm) = self.comm().filter(|_| !hashes.is_empty()) else { return Ok(()) };
        let all = gather_numbers(&streams.transfer, comm, TAG, hashes)?;
        // By what all have, so that each rank finds the same parameter, also one that it holds a part of.
        for (param, own) in hashes.iter().enumerate() {
            let of_ranks = || all.iter().skip(param).step_by(hashes.len()).enumerate().filter(|(_, h)| **h != NO_HASH);
            let Some(expected) = of_ranks().map(|(_, hash)| hash).find(|hash| *own == NO_HASH || *hash == own) else {
                continue;
            };
            let Some((peer, _)) = of_ranks().find(|(_, hash)| *hash != expected) else { continue };
            let field = format!("moments of {}, which ranks hold whole", self.specs()[param].name);
            let peer_value = "others (experts and shards are parts of a parameter, as optimizer_params has them)";
            let (value, peer_value) = ("values of its own".into(), peer_value.into());
            return Err(Error::ConfigMismatch { call: CALL, field, rank, value, peer, peer_value });
        }
        Ok(())
    }

    /// Refuses counts that differ from rank to rank: another state has taken the folder meanwhile.
    fn agree(&mut self, counts: &Counts) -> Result<()> {
        let (rank, fields, streams) = (self.rank(), counts.fields(), self.streams());
        let Some(comm) = self.comm().filter(|comm| comm.size() > 1) else { return Ok(()) };
        let all = gather_numbers(&streams.transfer, comm, TAG, &ComparedField::values(&fields))?;
        compare_fields(CALL, rank, &fields, &all)
    }
}

const TAG: Tag = Tag { layer: 0, op: Op::Weights, sequence: 0 };

/// Elements of a parameter's first moment that ranks compare before a save.
const COMPARED_ELEMENTS: usize = 1024;
/// Of a parameter that the rank holds a part of.
const NO_HASH: u64 = 0;

/// Refuses a folder that holds files of a checkpoint which are not a state's, and which a save would replace. Links are
/// followed: what config.json says counts, wherever it lies.
fn check_target(dir: &Path) -> Result<()> {
    let folder = Folder::open(dir, OpenOptions { follow_links: true, ..Default::default() })?;
    let path = dir.join(CONFIG);
    let refused = |path: &Path, found: String| {
        Err(config_error(path, "model_type", format_args!("\"{KIND}\", or no checkpoint here"), found).into())
    };
    let Some(config) = folder.find(CONFIG)? else {
        let there = |name: &&str| dir.join(name).symlink_metadata().is_ok();
        return match [SINGLE, INDEX, QUANTIZATION].into_iter().find(there) {
            None => Ok(()),
            Some(name) => refused(&path, format!("{name} without {CONFIG}")),
        };
    };
    let kind = parse_value(&read_limited(&config, MAX_CONFIG)?, &config)?;
    match kind.get("model_type").and_then(Value::as_str) {
        Some(KIND) => Ok(()),
        other => refused(&config, other.unwrap_or("another").to_string()),
    }
}

/// The header of the file of tensors, and these in the order of their bytes: wide types first, so that each is aligned.
fn plan(mut items: Vec<StateItem>) -> Result<(Vec<u8>, Vec<StateItem>)> {
    items.sort_by(|a, b| (on_disk(b.dtype), &a.name).cmp(&(on_disk(a.dtype), &b.name)));
    let mut offset = 0;
    let infos = items.iter().map(|item| {
        let end = offset + item.dims.iter().product::<usize>() * item.dtype.size();
        let data_offsets = (std::mem::replace(&mut offset, end), end);
        (item.name.clone(), TensorInfo { dtype: on_disk(item.dtype), shape: item.dims.clone(), data_offsets })
    });
    let infos = infos.collect();
    let header =
        header::write(infos).map_err(|problem| CheckpointError::Header { path: SINGLE.to_string(), problem })?;
    Ok((header, items))
}

fn write(dir: &Path, out: &mut dyn Write, bytes: &[u8]) -> Result<()> {
    Ok(out.write_all(bytes).map_err(|e| io_error(dir, e))?)
}

/// The first of these elements that no step leaves behind, and which would spoil all steps to come: one that is not
/// finite, or a negative second moment. Its index among them, and its value.
fn first_unusable(item: &StateItem, bytes: &[u8]) -> Option<(usize, f32)> {
    let is_unusable = |x: f32| !x.is_finite() || (item.kind == StateKind::Second && x < 0.0);
    let found = |(i, x): (usize, f32)| is_unusable(x).then_some((i, x));
    match item.dtype {
        DType::BF16 => {
            bytes.chunks_exact(2).map(|b| f32::from_le_bytes([0, 0, b[0], b[1]])).enumerate().find_map(found)
        }
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).enumerate().find_map(found),
    }
}

/// Bytes of bf16 as bytes of f32.
fn widened(bytes: &[u8]) -> Vec<u8> {
    bytes.chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]).collect()
}

#[cfg(test)]
#[path = "optimizer_tests.rs"]
mod tests;
