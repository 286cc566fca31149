//! The files of a checkpoint folder and the tensors in them.
//!
//! Everything is read by position into memory of a size that the headers fixed, not mapped: a file that shrinks
//! while it is read is an error here and would be a signal there.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde::de::{IgnoredAny, MapAccess};

use super::folder::{Folder, INDEX, SINGLE, plain_name};
use super::header;
use super::json::{
    Keyed, MAX_INDEX, MAX_TENSORS, Unique, check_index, config_error, io_error, open_file, read_limited,
};
use crate::error::CheckpointError;

/// Most files of a checkpoint; DeepSeek-V3 has 163.
pub(super) const MAX_SHARDS: usize = 4096;

#[cfg(target_endian = "big")]
compile_error!("safetensors are little-endian and are read without conversion");

/// One file, kept open: replacing it does not change what is read.
#[derive(Debug)]
struct ShardFile {
    path: PathBuf,
    file: File,
}

/// Where a tensor lies.
#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    shard: u32,
    /// Type on disk.
    pub dtype: Dtype,
    /// Shape on disk.
    pub shape: Vec<usize>,
    start: u64,
    /// Bytes on disk.
    pub bytes: u64,
}

/// All tensors of a folder.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    shards: Vec<ShardFile>,
    tensors: BTreeMap<String, TensorEntry>,
}

impl Files {
    /// None of a folder's files.
    pub fn none(folder: &Folder) -> Self {
        Self { dir: folder.dir().to_path_buf(), shards: Vec::new(), tensors: BTreeMap::new() }
    }

    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    pub fn open(folder: &Folder) -> Result<Self, CheckpointError> {
        let dir = folder.dir();
        let mut files = Self::none(folder);
        if let Some(single) = folder.find(SINGLE)? {
            files.tensors = files.add(&single)?.into_iter().collect();
            return Ok(files);
        }
        let index = folder.find(INDEX)?;
        let index = index.ok_or_else(|| io_error(dir, format_args!("holds neither {SINGLE} nor {INDEX}")))?;
        files.open_index(&index, folder)?;
        Ok(files)
    }

    fn open_index(&mut self, index: &Path, folder: &Folder) -> Result<(), CheckpointError> {
        let map = parse_index(&read_limited(index, MAX_INDEX)?, index)?;
        let mut shards: BTreeMap<&str, HashMap<String, TensorEntry>> = BTreeMap::new();
        let mut tensors = 0;
        for (name, file) in &map {
            if !shards.contains_key(file.as_str()) {
                if shards.len() == MAX_SHARDS {
                    return Err(config_error(index, "weight_map", format!("at most {MAX_SHARDS} files"), "more"));
                }
                let added = self.add(&shard_path(folder, index, file)?)?;
                tensors += added.len();
                if tensors > MAX_TENSORS {
                    return Err(config_error(index, "weight_map", format!("shards of {MAX_TENSORS} tensors"), "more"));
                }
                shards.insert(file, added.into_iter().collect());
            }
            let entry = shards.get_mut(file.as_str()).and_then(|tensors| tensors.remove(name));
            let entry = entry.ok_or_else(|| CheckpointError::Missing {
                path: self.dir.join(file).display().to_string(),
                tensor: name.clone(),
                expected: format!("it in this file, as {INDEX} says"),
            })?;
            self.tensors.insert(name.clone(), entry);
        }
        Ok(())
    }

    fn add(&mut self, path: &Path) -> Result<Vec<(String, TensorEntry)>, CheckpointError> {
        let (file, len) = open_file(path)?;
        let header = header::read(path, &file, len)?;
        let shard = self.shards.len() as u32;
        self.shards.push(ShardFile { path: path.to_path_buf(), file });
        let entry = |info: safetensors::tensor::TensorInfo| TensorEntry {
            shard,
            dtype: info.dtype,
            shape: info.shape,
            start: header.data + info.data_offsets.0 as u64,
            bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
        };
        Ok(header.tensors.into_iter().map(|(name, info)| (name, entry(info))).collect())
    }

    /// Folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Files that are read.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// A tensor's place.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// All tensors by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// Tensors whose name starts with `prefix`.
    pub fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a TensorEntry)> {
        self.tensors
            .range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded))
            .take_while(move |(name, _)| name.starts_with(prefix))
            .map(|(name, entry)| (name.as_str(), entry))
    }

    /// File that holds a tensor, for messages.
    pub fn path_of(&self, entry: &TensorEntry) -> String {
        self.shards[entry.shard as usize].path.display().to_string()
    }

    /// Fills `out` from byte `offset` of a tensor.
    pub fn read(&self, name: &str, entry: &TensorEntry, offset: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        let shard = &self.shards[entry.shard as usize];
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= entry.bytes);
        if end.is_none() {
            return Err(CheckpointError::Tensor {
                path: self.path_of(entry),
                tensor: name.to_string(),
                expected: format!("{} bytes at {offset}", out.len()),
                found: format!("{} bytes in all", entry.bytes),
            });
        }
        header::read_exact_at(&shard.file, out, entry.start + offset).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => CheckpointError::Truncated {
                path: self.path_of(entry),
                tensor: name.to_string(),
                offset: entry.start + offset,
                expected: out.len(),
            },
            _ => io_error(&shard.path, e),
        })
    }
}

struct WeightMap(Vec<(String, String)>);

impl Keyed for WeightMap {
    fn read<'de, A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Option<Self>, A::Error> {
        match key {
            "weight_map" => map.next_value::<Unique<String>>().map(|Unique(pairs)| Some(Self(pairs))),
            _ => map.next_value::<IgnoredAny>().map(|_| None),
        }
    }
}

/// Tensor names and file names of an index.
pub(super) fn parse_index(json: &[u8], path: &Path) -> Result<Vec<(String, String)>, CheckpointError> {
    let refuse = |problem| config_error(path, "weight_map", "tensor names with file names, within the limits", problem);
    check_index(json).map_err(refuse)?;
    let Unique(mut fields) = serde_json::from_slice::<Unique<WeightMap>>(json)
        .map_err(|e| config_error(path, "weight_map", "tensor names with file names", e))?;
    match fields.pop() {
        Some((_, WeightMap(pairs))) => Ok(pairs),
        None => Err(config_error(path, "weight_map", "tensor names with file names", "nothing")),
    }
}

/// A shard's path.
fn shard_path(folder: &Folder, index: &Path, entry: &str) -> Result<PathBuf, CheckpointError> {
    let name = plain_name(entry).ok_or_else(|| CheckpointError::OutsideFolder {
        path: index.display().to_string(),
        entry: entry.to_string(),
        problem: "not a plain file name".to_string(),
    })?;
    folder.require(name)
}
