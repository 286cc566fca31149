//! Writes a whole checkpoint: planned first, so that each header is complete before its file's first byte, then
//! streamed, a matrix of a block at a time.

use std::collections::HashSet;
use std::io::Write;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::{Map, Value, json};

use super::commit::Save;
use super::folder::{CONFIG, INDEX, SINGLE, same_file};
use super::gather::PlannedTensor;
use super::header;
use super::json::io_error;
use super::nvfp4::{Nvfp4Item, Nvfp4Part};
use super::open::Checkpoint;
use super::options::SaveOptions;
use super::parts::RankTensor;
use super::rank_params::{Item, RankParams};
use super::reader::MAX_SHARDS;
use super::stored::{Stored, on_disk};
use crate::error::{CheckpointError, Error, Result};
use crate::fnv1a::fnv1a;

const CALL: &str = "Checkpoint::save";
const COPY_BYTES: usize = 1 << 20;
/// Elements of a tensor beside the blocks that come to the writer at once.
const PIECE: usize = 16 << 20;

/// One tensor of the new checkpoint.
pub(super) enum NewTensor<'a> {
    /// Made of the parameters of the block with this index.
    Block(usize, PlannedTensor),
    /// Made of the ranks' parts of the tensor with this index.
    Part { index: usize, name: String, info: TensorInfo },
    /// Copied as it is.
    Copy(&'a str),
    /// De-quantized.
    Plain(String, Stored<'a>),
    /// Quantized.
    Nvfp4(Nvfp4Item),
}

/// One file of tensors of the new checkpoint.
struct ShardPlan<'a> {
    file: String,
    header: Vec<u8>,
    items: Vec<(String, NewTensor<'a>)>,
}

/// Content of a save.
pub(super) struct SavePlan<'a> {
    shards: Vec<ShardPlan<'a>>,
    /// Files of text, the index among them.
    others: Vec<(&'static str, Vec<u8>)>,
}

impl SavePlan<'_> {
    /// A number that differs where layers do, or tensors in name, type, shape or file.
    pub fn fingerprint(&self, shares: &RankParams<'_>) -> u64 {
        let layers: Vec<_> = shares.blocks().map(|(layer, _)| layer).collect();
        let tensors: Vec<_> = shares.tensors().iter().map(|tensor| &tensor.name).collect();
        let files: Vec<_> = self.shards.iter().map(|shard| (&shard.file, fnv1a(&shard.header))).collect();
        fnv1a(format!("{layers:?} {tensors:?} {files:?}"))
    }
}

impl Checkpoint {
    /// Plans a save of blocks, everything else as it is here.
    pub(super) fn plan_save(&self, shares: &RankParams<'_>, options: SaveOptions) -> Result<SavePlan<'_>> {
        let (items, dequantized) = self.items(shares)?;
        self.plan_files(items, vec![(CONFIG, self.config_text(dequantized)?)], options)
    }

    /// Plans a save of `items` and other files.
    pub(super) fn plan_files<'a>(
        &'a self,
        items: Vec<NewTensor<'a>>,
        mut others: Vec<(&'static str, Vec<u8>)>,
        options: SaveOptions,
    ) -> Result<SavePlan<'a>> {
        let mut items = items.into_iter().map(|item| Ok((self.info(&item)?, item))).collect::<Result<Vec<_>>>()?;
        items.sort_by(|((a, _), _), ((b, _), _)| a.cmp(b));
        let mut groups: Vec<(u64, Vec<_>)> = Vec::new();
        for ((name, info), item) in items {
            let bytes = info.data_offsets.1 as u64;
            match groups.last_mut() {
                Some((sum, group)) if sum.saturating_add(bytes) <= options.max_shard_bytes => {
                    *sum += bytes;
                    group.push(((name, info), item));
                }
                _ => groups.push((bytes, vec![((name, info), item)])),
            }
        }
        let count = groups.len();
        if count > MAX_SHARDS {
            let expected = format!("a size that makes at most {MAX_SHARDS} files");
            return Err(Error::invalid(CALL, "max_shard_bytes", expected, options.max_shard_bytes));
        }
        if count == 0 {
            let expected = "at least one, given or of the checkpoint that is read";
            return Err(Error::invalid(CALL, "tensors", expected, "none"));
        }
        let total = groups.iter().fold(0u64, |total, (bytes, _)| total.saturating_add(*bytes));
        let mut shards = Vec::new();
        for (n, (_, group)) in groups.into_iter().enumerate() {
            let file = match count {
                1 => SINGLE.to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", n + 1),
            };
            shards.push(shard(file, group)?);
        }
        if count > 1 {
            let files = shards.iter().flat_map(|shard| shard.items.iter().map(|(name, _)| (name, &shard.file)));
            let map: Map<String, Value> = files.map(|(name, file)| (name.clone(), file.as_str().into())).collect();
            let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
            let text =
                serde_json::to_vec_pretty(&index).map_err(|e| Error::invalid(CALL, INDEX, "JSON to write", e))?;
            others.push((INDEX, text));
        }
        Ok(SavePlan { shards, others })
    }

    /// Refuses to replace what is being read. A folder is the same through whatever links it is named.
    pub(super) fn check_target(&self, dir: &Path, allowed: Option<bool>) -> Result<()> {
        let Ok(target) = dir.canonicalize() else { return Ok(()) };
        let meta = |path: &Path| path.metadata();
        let same = |folder: &Path| match (meta(folder), meta(&target)) {
            (Ok(a), Ok(b)) => folder.canonicalize().is_ok_and(|real| real == target) || same_folder(&a, &b),
            _ => false,
        };
        // Shards may be links to files of other folders.
        let real = |path: &Path| path.canonicalize().ok().and_then(|path| path.parent().map(Path::to_path_buf));
        let own = same(self.dir()) || self.files.paths().any(|path| real(path).is_some_and(|folder| same(&folder)));
        if !own || allowed == Some(true) {
            return Ok(());
        }
        Err(CheckpointError::OwnSource {
            path: dir.display().to_string(),
            source_dir: self.dir().display().to_string(),
            allowed: allowed.is_some(),
        }
        .into())
    }

    /// Writes what was planned. With several ranks all of them call it, and the first one writes.
    pub(super) fn write_plan(&self, dir: &Path, plan: &SavePlan<'_>, shares: &mut RankParams<'_>) -> Result<()> {
        let mut save = if shares.writes() { Some(Save::begin(dir)?) } else { None };
        for shard in &plan.shards {
            let mut content = |out: &mut dyn Write| {
                write(dir, out, &shard.header)?;
                shard.items.iter().try_for_each(|(_, item)| self.write_item(dir, out, item, shares))
            };
            match &mut save {
                Some(save) => save.file(&shard.file, content)?,
                None => content(&mut std::io::sink())?,
            }
            shares.barrier()?;
        }
        if let Some(mut save) = save {
            for (name, text) in &plan.others {
                save.file(name, |out| write(dir, out, text))?;
            }
            save.finish()?;
        }
        shares.barrier()
    }

    /// Everything the new file holds, and whether any of it was quantized.
    fn items(&self, shares: &RankParams<'_>) -> Result<(Vec<NewTensor<'_>>, bool)> {
        let mut items = Vec::new();
        let mut seen: HashSet<String> = HashSet::new();
        let mut dequantized = false;
        let layers: Vec<usize> = shares.blocks().map(|(layer, _)| layer).collect();
        for (index, (layer, dtypes)) in shares.blocks().enumerate() {
            if layers[..index].contains(&layer) {
                return Err(Error::invalid(CALL, "blocks", "each layer once", format!("layer {layer} twice")));
            }
            let config = self.block(layer)?;
            let checked = self.check_block(&self.layout(layer, config), false)?;
            if let Some(kind) = checked.natural.present().map(|(kind, _)| kind).find(|kind| dtypes.get(*kind).is_none())
            {
                return Err(Error::invalid(CALL, format!("layer {layer}: {kind:?}"), "a tensor", "none"));
            }
            shares.check_block(index, config)?;
            dequantized |= checked.quantized;
            seen.extend(checked.names);
            let planned = self.plan_all(layer, config, &dtypes);
            items.extend(planned.into_iter().map(|tensor| NewTensor::Block(index, tensor)));
        }
        for (index, tensor) in shares.tensors().iter().enumerate() {
            let (info, stored) = self.part_info(tensor)?;
            if seen.contains(&tensor.name) {
                let found = "another, or one of a block";
                return Err(Error::invalid(CALL, &tensor.name, "a tensor that is given once", found));
            }
            dequantized |= stored.form.is_quantized();
            seen.extend(stored.names().map(str::to_string));
            seen.insert(tensor.name.clone());
            items.push(NewTensor::Part { index, name: tensor.name.clone(), info });
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
                items.push(NewTensor::Plain(name.to_string(), stored));
            }
        }
        items
            .extend(self.files.iter().filter(|(name, _)| !seen.contains(*name)).map(|(name, _)| NewTensor::Copy(name)));
        Ok((items, dequantized))
    }

    /// Type and shape of a tensor that ranks give parts of, and what it is here.
    fn part_info(&self, tensor: &RankTensor<'_>) -> Result<(TensorInfo, Stored<'_>)> {
        let (name, dims) = (&tensor.name, &tensor.dims);
        let Some(stored) = self.stored(name)? else {
            return Err(Error::invalid(CALL, name, "a tensor of this checkpoint", "none"));
        };
        Error::check_shape(CALL, name, &stored.dims, dims)?;
        let count: usize = dims.iter().product();
        if tensor.part.count() != count || !tensor.part.dtype().is_float() {
            let found = format!("{} {} elements", tensor.part.count(), tensor.part.dtype());
            return Err(Error::invalid(CALL, name, format!("parts of {count} floating elements"), found));
        }
        let (dtype, shape) = (on_disk(tensor.part.dtype()), dims.clone());
        Ok((TensorInfo { dtype, shape, data_offsets: (0, 0) }, stored))
    }

    /// Name, type, shape and, as the end of its offsets, size of an item.
    fn info(&self, item: &NewTensor<'_>) -> Result<(String, TensorInfo)> {
        let (name, dtype, shape) = match item {
            NewTensor::Part { name, info, .. } => (name.clone(), info.dtype, info.shape.clone()),
            NewTensor::Block(_, tensor) => (tensor.name.clone(), on_disk(tensor.dtype), tensor.dims.clone()),
            NewTensor::Plain(name, stored) => (name.clone(), on_disk(self.natural(stored.form)), stored.dims.clone()),
            NewTensor::Nvfp4(item) => {
                let dtype = match item.part {
                    Nvfp4Part::Codes => Dtype::U8,
                    Nvfp4Part::Scales => Dtype::F8_E4M3,
                    Nvfp4Part::Second => Dtype::F32,
                };
                (item.name(), dtype, item.shape())
            }
            NewTensor::Copy(name) => {
                let entry = self.files.get(name).ok_or_else(|| Error::invalid(CALL, *name, "a tensor", "none"))?;
                (name.to_string(), entry.dtype, entry.shape.clone())
            }
        };
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, dim| bits.checked_mul(*dim));
        let bits = bits.ok_or_else(|| Error::invalid(CALL, &name, "a size that fits memory", format!("{shape:?}")))?;
        Ok((name, TensorInfo { dtype, shape, data_offsets: (0, bits / 8) }))
    }

    /// Writes an item's bytes; on ranks that do not write, takes part in fetching them.
    fn write_item(
        &self,
        dir: &Path,
        out: &mut dyn Write,
        item: &NewTensor<'_>,
        shares: &mut RankParams<'_>,
    ) -> Result<()> {
        match item {
            NewTensor::Block(index, planned) => {
                let config = self.block(shares.layer(*index))?;
                for matrix in planned.parts() {
                    write(dir, out, &shares.matrix(*index, matrix, config)?)?;
                }
                Ok(())
            }
            NewTensor::Part { index, info, .. } => {
                let count = info.shape.iter().product();
                for first in (0..count).step_by(PIECE) {
                    let (bytes, _) = shares.elements(Item::Other(*index), first..count.min(first + PIECE))?;
                    write(dir, out, &bytes)?;
                }
                Ok(())
            }
            NewTensor::Plain(name, stored) => {
                let dtype = self.natural(stored.form);
                if shares.writes() {
                    write(dir, out, self.tensor(name, Some(dtype))?.as_bytes())?;
                }
                shares.wrote(stored.dims.iter().product::<usize>() * dtype.size())
            }
            NewTensor::Nvfp4(item) => write(dir, out, &self.nvfp4_bytes(item)?),
            NewTensor::Copy(name) => {
                let Some(entry) = self.files.get(name) else { return Ok(()) };
                let mut buffer = vec![0; if shares.writes() { COPY_BYTES.min(entry.bytes as usize) } else { 0 }];
                let mut offset = 0;
                while offset < entry.bytes {
                    let len = COPY_BYTES.min((entry.bytes - offset) as usize);
                    if shares.writes() {
                        self.files.read(name, entry, offset, &mut buffer[..len])?;
                        write(dir, out, &buffer[..len])?;
                    }
                    shares.wrote(len)?;
                    offset += len as u64;
                }
                Ok(())
            }
        }
    }

    fn config_text(&self, dequantized: bool) -> Result<Vec<u8>> {
        if !dequantized {
            return Ok(self.model.text.clone());
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
        Ok(serde_json::to_vec_pretty(&config).map_err(|e| io_error(&self.dir().join(CONFIG), e))?)
    }
}

/// A file of tensors, wide types first, so that every tensor is aligned to its type.
fn shard<'a>(file: String, mut items: Vec<((String, TensorInfo), NewTensor<'a>)>) -> Result<ShardPlan<'a>> {
    items.sort_by(|((a, left), _), ((b, right), _)| (right.dtype, a).cmp(&(left.dtype, b)));
    let mut offset = 0usize;
    for ((name, info), _) in &mut items {
        let size = info.data_offsets.1;
        let end = offset.checked_add(size).ok_or_else(|| Error::invalid(CALL, name.as_str(), "a size", size))?;
        info.data_offsets = (offset, end);
        offset = end;
    }
    let header = header::write(items.iter().map(|(info, _)| info.clone()).collect())
        .map_err(|problem| CheckpointError::Header { path: file.clone(), problem })?;
    Ok(ShardPlan { file, header, items: items.into_iter().map(|((name, _), item)| (name, item)).collect() })
}

fn write(dir: &Path, out: &mut dyn Write, bytes: &[u8]) -> Result<()> {
    Ok(out.write_all(bytes).map_err(|e| io_error(dir, e))?)
}

/// Whether two folders are one; where files have no numbers, their canonical paths alone say so.
fn same_folder(a: &std::fs::Metadata, b: &std::fs::Metadata) -> bool {
    cfg!(unix) && same_file(a, b)
}
