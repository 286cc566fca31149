//! Writes a whole checkpoint: planned first, so that the header is complete before the first byte, then streamed.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use tempfile::NamedTempFile;

use super::gather::Planned;
use super::json::{MAX_CONFIG, io_error, read_limited};
use super::quantize::{Nvfp4Item, Nvfp4Part};
use super::stored::{Stored, on_disk};
use super::{BlockParams, Checkpoint, LoadOptions, header};
use crate::error::{CheckpointError, Error, Result};

const CALL: &str = "Checkpoint::save";
const CHUNK: usize = 1 << 20;

/// One tensor of the new file.
pub(super) enum Item<'a> {
    /// Made of the parameters of the block with this index.
    Block(usize, Planned),
    /// Copied as it is.
    Copy(&'a str),
    /// De-quantized.
    Plain(String, Stored<'a>),
    /// Quantized.
    Nvfp4(Nvfp4Item),
}

impl Checkpoint {
    pub(super) fn write_all(&self, dir: &Path, blocks: &[(usize, &BlockParams)]) -> Result<()> {
        let (items, dequantized) = self.items(blocks)?;
        let config = self.config_text(dequantized)?;
        self.write_files(dir, items, blocks, vec![("config.json", config)])
    }

    /// Writes `model.safetensors` of `items`, then the other files.
    pub(super) fn write_files(
        &self,
        dir: &Path,
        items: Vec<Item<'_>>,
        blocks: &[(usize, &BlockParams)],
        others: Vec<(&str, Vec<u8>)>,
    ) -> Result<()> {
        let mut items = items.into_iter().map(|item| Ok((self.info(&item)?, item))).collect::<Result<Vec<_>>>()?;
        // Wide types first, so that every tensor is aligned to its type.
        items.sort_by(|((a, left), _), ((b, right), _)| (right.dtype, a).cmp(&(left.dtype, b)));
        let mut offset = 0usize;
        for ((name, info), _) in &mut items {
            let size = info.data_offsets.1;
            let end = offset.checked_add(size).ok_or_else(|| Error::invalid(CALL, name.as_str(), "a size", size))?;
            info.data_offsets = (offset, end);
            offset = end;
        }
        let header = header::write(items.iter().map(|(info, _)| info.clone()).collect())
            .map_err(|problem| CheckpointError::Header { path: dir.display().to_string(), problem })?;
        std::fs::create_dir_all(dir).map_err(|e| io_error(dir, e))?;
        let model = temporary(dir, |out| {
            write(dir, out, &header)?;
            items.iter().try_for_each(|(_, item)| self.write_item(dir, out, item, blocks))
        })?;
        let mut files = vec![(model, "model.safetensors")];
        for (name, content) in others {
            files.push((temporary(dir, |out| write(dir, out, &content))?, name));
        }
        for (file, name) in files {
            let path = dir.join(name);
            file.persist(&path).map_err(|e| io_error(&path, e.error))?;
        }
        sync_folder(dir)
    }

    /// Everything the new file holds, and whether any of it was quantized.
    fn items(&self, blocks: &[(usize, &BlockParams)]) -> Result<(Vec<Item<'_>>, bool)> {
        let mut items = Vec::new();
        let mut seen: HashSet<String> = HashSet::new();
        let mut dequantized = false;
        for (index, (layer, params)) in blocks.iter().enumerate() {
            if blocks[..index].iter().any(|(other, _)| other == layer) {
                return Err(Error::invalid(CALL, "blocks", "each layer once", format!("layer {layer} twice")));
            }
            let checked = self.check_block(&self.layout(*layer, self.block(*layer)?), false)?;
            if let Some(role) = checked.natural.keys().find(|role| params.get(**role).is_none()) {
                return Err(Error::invalid(CALL, format!("layer {layer}: {role:?}"), "a tensor", "none"));
            }
            let all = LoadOptions { rank: 0, ranks: 1, dtype: None };
            let planned = self.plan(CALL, *layer, params, all)?;
            dequantized |= checked.form.is_quantized();
            seen.extend(checked.names);
            items.extend(planned.into_iter().map(|tensor| Item::Block(index, tensor)));
        }
        for (name, entry) in self.files.iter() {
            if seen.contains(name) || !matches!(entry.dtype, Dtype::F8_E4M3 | Dtype::U8) {
                continue;
            }
            let name = name.strip_suffix("_packed").or(name.strip_suffix("_blocks")).unwrap_or(name);
            // A scale is no weight: what does not resolve is copied or belongs to another.
            let Ok(Some(stored)) = self.stored(name) else { continue };
            if stored.form.is_quantized() {
                dequantized = true;
                seen.extend(stored.names().map(str::to_string));
                items.push(Item::Plain(name.to_string(), stored));
            }
        }
        items.extend(self.files.iter().filter(|(name, _)| !seen.contains(*name)).map(|(name, _)| Item::Copy(name)));
        Ok((items, dequantized))
    }

    /// Name, type, shape and, as the end of its offsets, size of an item.
    fn info(&self, item: &Item<'_>) -> Result<(String, TensorInfo)> {
        let (name, dtype, shape) = match item {
            Item::Block(_, tensor) => (tensor.name.clone(), on_disk(tensor.dtype), tensor.dims.clone()),
            Item::Plain(name, stored) => (name.clone(), on_disk(self.natural(stored.form)), stored.dims.clone()),
            Item::Nvfp4(item) => {
                let dtype = match item.part {
                    Nvfp4Part::Codes => Dtype::U8,
                    Nvfp4Part::Scales => Dtype::F8_E4M3,
                    Nvfp4Part::Second => Dtype::F32,
                };
                (item.name(), dtype, item.shape())
            }
            Item::Copy(name) => {
                let entry = self.files.get(name).ok_or_else(|| Error::invalid(CALL, *name, "a tensor", "none"))?;
                (name.to_string(), entry.dtype, entry.shape.clone())
            }
        };
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, dim| bits.checked_mul(*dim));
        let bits = bits.ok_or_else(|| Error::invalid(CALL, &name, "a size that fits memory", format!("{shape:?}")))?;
        Ok((name, TensorInfo { dtype, shape, data_offsets: (0, bits / 8) }))
    }

    fn write_item(
        &self,
        dir: &Path,
        out: &mut dyn Write,
        item: &Item<'_>,
        blocks: &[(usize, &BlockParams)],
    ) -> Result<()> {
        match item {
            Item::Block(index, planned) => {
                let (layer, params) = blocks[*index];
                let experts = self.block(layer)?.router.num_experts;
                write(dir, out, planned.build(params, experts)?.as_bytes())
            }
            Item::Plain(name, stored) => {
                let tensor = self.tensor(name, Some(self.natural(stored.form)))?;
                write(dir, out, tensor.as_bytes())
            }
            Item::Nvfp4(item) => write(dir, out, &self.nvfp4_bytes(item)?),
            Item::Copy(name) => {
                let Some(entry) = self.files.get(name) else { return Ok(()) };
                let mut buffer = vec![0; CHUNK.min(entry.bytes as usize)];
                let mut offset = 0;
                while offset < entry.bytes {
                    let len = buffer.len().min((entry.bytes - offset) as usize);
                    self.files.read(name, entry, offset, &mut buffer[..len])?;
                    write(dir, out, &buffer[..len])?;
                    offset += len as u64;
                }
                Ok(())
            }
        }
    }

    fn config_text(&self, dequantized: bool) -> Result<Vec<u8>> {
        let path = self.dir().join("config.json");
        if !dequantized {
            return Ok(read_limited(&path, MAX_CONFIG)?);
        }
        let mut config = self.config().clone();
        for object in [Some("text_config"), None] {
            let object = match object {
                Some(key) => config.get_mut(key),
                None => Some(&mut config),
            };
            if let Some(map) = object.and_then(serde_json::Value::as_object_mut) {
                map.remove("quantization_config");
            }
        }
        Ok(serde_json::to_vec_pretty(&config).map_err(|e| io_error(&path, e))?)
    }
}

fn write(dir: &Path, out: &mut dyn Write, bytes: &[u8]) -> Result<()> {
    Ok(out.write_all(bytes).map_err(|e| io_error(dir, e))?)
}

/// A complete, synced file under a temporary name.
fn temporary(dir: &Path, content: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<NamedTempFile> {
    let failed = |e: std::io::Error| Error::from(io_error(dir, e));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moebius-");
    // Readable as any new file is; a temporary file's default is the owner only.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let file = builder.tempfile_in(dir).map_err(failed)?;
    let mut out = BufWriter::with_capacity(CHUNK, file.as_file());
    content(&mut out)?;
    out.flush().map_err(failed)?;
    drop(out);
    file.as_file().sync_all().map_err(failed)?;
    Ok(file)
}

/// Makes renames durable.
fn sync_folder(dir: &Path) -> Result<()> {
    if cfg!(unix) {
        let sync = File::open(dir).and_then(|folder| folder.sync_all());
        sync.map_err(|e| io_error(dir, e))?;
    }
    Ok(())
}
