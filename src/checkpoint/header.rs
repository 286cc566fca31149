//! The header of one safetensors file.
//!
//! Format: eight bytes of little-endian length, that many bytes of JSON, then the tensors without gaps
//! (<https://github.com/huggingface/safetensors>). The crate `safetensors` validates types, shapes and offsets; the
//! duplicate names that its map would swallow are refused here.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use safetensors::tensor::{Metadata, SafeTensorError, TensorInfo};
use serde::de::{Error as _, MapAccess};

use super::fields::clip;
use super::json::{HEADER, Keyed, Text, Unique, io_error};
use crate::error::CheckpointError;

/// Most bytes of a header. The format's own limit is 100 million; a file that held all of Kimi-K2 in NVFP4, which none
/// does, would have 45.
const MAX_HEADER: u64 = 64 << 20;
const LENGTH: u64 = 8;
/// Most characters of a problem's description, which may quote a hostile file.
const MAX_PROBLEM: usize = 400;

/// Content of a header, checked against the file's length.
#[derive(Debug)]
pub(super) struct Header {
    /// Names and places; offsets are relative to `data`.
    pub tensors: Vec<(String, TensorInfo)>,
    /// Offset of the first tensor's bytes in the file.
    pub data: u64,
}

impl Keyed for TensorInfo {
    fn read<'de, A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Option<Self>, A::Error> {
        match key {
            "__metadata__" => map.next_value::<Unique<Text>>().map(|_| None),
            _ => map.next_value().map(Some).map_err(|e| A::Error::custom(format_args!("tensor {}: {e}", clip(key)))),
        }
    }
}

/// Reads and checks a file's header.
pub(super) fn read(path: &Path, file: &File, file_len: u64) -> Result<Header, CheckpointError> {
    let damaged = |problem: String| CheckpointError::Header {
        path: path.display().to_string(),
        problem: problem.chars().take(MAX_PROBLEM).collect(),
    };
    let read = |out: &mut [u8], at| read_exact_at(file, out, at).map_err(|e| io_error(path, e));
    let mut prefix = [0; LENGTH as usize];
    if file_len >= LENGTH {
        read(&mut prefix, 0)?;
    }
    let length = length(prefix, file_len).map_err(damaged)?;
    let mut json = vec![0; length as usize];
    read(&mut json, LENGTH)?;
    let tensors = parse(&json, file_len - LENGTH - length).map_err(damaged)?;
    Ok(Header { tensors, data: LENGTH + length })
}

/// How a pointer of Git LFS begins (`version https://git-lfs…`), which a clone without LFS has in the place of weights.
const GIT_LFS: &[u8; LENGTH as usize] = b"version ";

/// Length of the JSON, from the first bytes of a file of `file_len` bytes.
pub(super) fn length(prefix: [u8; LENGTH as usize], file_len: u64) -> Result<u64, String> {
    let Some(rest) = file_len.checked_sub(LENGTH) else {
        return Err(format!("the file has {file_len} bytes, fewer than a header's length takes"));
    };
    let length = u64::from_le_bytes(prefix);
    if prefix == *GIT_LFS {
        return Err("it is a pointer of Git LFS and not the file itself, which `git lfs pull` brings".into());
    }
    if length > MAX_HEADER || length > rest {
        return Err(format!("it claims {length} bytes, the file has {rest} (limit {MAX_HEADER})"));
    }
    Ok(length)
}

/// Parses a header's JSON for a file that has `data` bytes behind it.
pub(super) fn parse(json: &[u8], data: u64) -> Result<Vec<(String, TensorInfo)>, String> {
    HEADER.check(json)?;
    let Unique(mut tensors) = serde_json::from_slice::<Unique<TensorInfo>>(json).map_err(|e| e.to_string())?;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let metadata = Metadata::new(None, tensors.clone()).map_err(|e| match (&e, tensors.iter().find_map(misfit)) {
        // Which names a tensor of its own; the others name none.
        (SafeTensorError::InvalidOffset(_), _) | (_, None) => e.to_string(),
        (_, Some(at)) => format!("{e}: {at}"),
    })?;
    if metadata.data_len() as u64 != data {
        return Err(format!("tensors end at byte {}, the file has {data} bytes for them", metadata.data_len()));
    }
    Ok(tensors)
}

/// A tensor whose bytes are not those of its type and shape.
fn misfit((name, info): &(String, TensorInfo)) -> Option<String> {
    let (start, end) = info.data_offsets;
    let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |bits, size| bits.checked_mul(*size));
    let fits = bits.is_some_and(|bits| bits.is_multiple_of(8) && start.checked_add(bits / 8) == Some(end));
    let shape = clip(&format!("{:?}", &info.shape[..info.shape.len().min(16)]));
    (!fits).then(|| format!("tensor {}, {} of shape {shape} at bytes {start}..{end}", clip(name), info.dtype))
}

/// Serializes a header, padded so that the tensors behind it are aligned.
pub(super) fn write(tensors: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, String> {
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(format), tensors).map_err(|e| e.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
    json.resize(json.len().next_multiple_of(LENGTH as usize), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

/// Reads by position, without moving a cursor that threads would share.
#[cfg(unix)]
pub(super) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

/// Reads by position.
#[cfg(windows)]
pub(super) fn read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> std::io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => {
                out = &mut out[n..];
                offset += n as u64;
            }
        }
    }
    Ok(())
}
