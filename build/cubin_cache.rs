//! Compiled kernels that outlive a build: a folder of cubins by what they were made from.
//!
//! Every set of features has a build script's run of its own, and each would compile the same kernels. An entry is a
//! folder named by a hash of all that a cubin depends on: the stage's source and all that it includes from the kernels'
//! folder, nvcc's flags and its version. It appears whole, by a rename, and only for a compilation that succeeded; it
//! is read only if the cubin still has the hash noted beside it. A cache that cannot be written is no error: it stays
//! as it is. All of this holds for PTX too, which the decoders' kernels are compiled to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

/// Entries that are kept, the last used first: six generations of all stages for two architectures, some 300 MB.
pub const KEPT_ENTRIES: usize = 256;
/// Age from which what an interrupted build left is removed.
pub const STALE: Duration = Duration::from_secs(24 * 3600);
/// Prefix of the names of unfinished entries.
const UNFINISHED: &str = "unfinished-";

/// Files of an entry.
const CUBIN: &str = "cubin";
const LOG: &str = "log";
const SUM: &str = "sha256";

/// A folder of cubins.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
}

/// Where a cubin and nvcc's log lie outside the cache.
#[derive(Debug, Clone, Copy)]
pub struct Output<'a> {
    /// The cubin, or the PTX where that is what nvcc makes.
    pub image: &'a Path,
    /// Output of nvcc: registers, spills, stack frames.
    pub log: &'a Path,
}

/// The name of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// The entry's folder in the cache.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Cache {
    /// The cache in `folder`, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The folder that `given` names, else one under cargo's target directory, the closest folder around `out_dir` with
    /// cargo's tag; else one in `out_dir`, which no other build shares.
    pub fn locate(given: Option<PathBuf>, out_dir: &Path) -> Self {
        let tagged = || out_dir.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file());
        let place = given.unwrap_or_else(|| tagged().unwrap_or(out_dir).join("moebius-cubins"));
        Self::new(place)
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The cubin of `inputs` in `output`, from the cache or from `compile`, which writes both files of `output`.
    /// Whether it was compiled.
    pub fn fetch(
        &self,
        inputs: &Inputs<'_>,
        output: Output<'_>,
        compile: impl FnOnce() -> Result<(), String>,
    ) -> Result<bool, String> {
        let key = inputs.key()?;
        if self.take(&key, output) {
            return Ok(false);
        }
        compile()?;
        // Not if a source was edited meanwhile: nobody knows which text was compiled.
        if inputs.key()? == key {
            self.store(&key, output);
        }
        Ok(true)
    }

    /// Copies an entry out; `false`: there is none, or it is damaged.
    fn take(&self, key: &Key, output: Output<'_>) -> bool {
        let entry = self.folder.join(key.as_str());
        if !entry.is_dir() {
            return false;
        }
        let read = || -> std::io::Result<bool> {
            let (cubin, sum) = (std::fs::read(entry.join(CUBIN))?, std::fs::read_to_string(entry.join(SUM))?);
            if sum != hex(&cubin) {
                return Ok(false);
            }
            std::fs::write(output.image, cubin)?;
            std::fs::copy(entry.join(LOG), output.log)?;
            Ok(true)
        };
        let taken = matches!(read(), Ok(true));
        if taken {
            // The time of its last use; a folder that cannot be written keeps its order.
            let _ = std::fs::File::options()
                .append(true)
                .open(entry.join(SUM))
                .and_then(|f| f.set_modified(SystemTime::now()));
        } else {
            let _ = std::fs::remove_dir_all(&entry);
        }
        taken
    }

    /// Adds an entry, if that is possible.
    fn store(&self, key: &Key, output: Output<'_>) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.folder.join(format!("{UNFINISHED}{}-{number}", std::process::id()));
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(&unfinished)?;
            let cubin = std::fs::read(output.image)?;
            std::fs::write(unfinished.join(SUM), hex(&cubin))?;
            std::fs::write(unfinished.join(CUBIN), cubin)?;
            std::fs::copy(output.log, unfinished.join(LOG))?;
            // Fails where another build was faster, whose entry is as good.
            std::fs::rename(&unfinished, self.folder.join(key.as_str()))
        };
        if write().is_err() {
            let _ = std::fs::remove_dir_all(&unfinished);
        }
    }

    /// Removes all but the `kept` entries that were used last, and what interrupted builds left more than `stale` ago.
    pub fn prune(&self, kept: usize, stale: Duration) {
        let Ok(list) = std::fs::read_dir(&self.folder) else { return };
        let mut entries: Vec<(SystemTime, PathBuf)> = Vec::new();
        for path in list.flatten().map(|entry| entry.path()) {
            let unfinished = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(UNFINISHED));
            let dated = if unfinished { path.clone() } else { path.join(SUM) };
            // Without a date it is no entry of this cache, or another build is removing it.
            let Ok(used) = std::fs::metadata(dated).and_then(|m| m.modified()) else { continue };
            match unfinished {
                false => entries.push((used, path)),
                true if used.elapsed().is_ok_and(|age| age > stale) => {
                    let _ = std::fs::remove_dir_all(path);
                }
                true => {}
            }
        }
        entries.sort();
        let surplus = entries.len().saturating_sub(kept);
        for (_, path) in &entries[..surplus] {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

/// All that a cubin is made from.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The stage's file.
    pub source: &'a Path,
    /// The folder that includes are looked up in (`-I`).
    pub folder: &'a Path,
    /// nvcc's arguments, but for the names of the source and of the output.
    pub flags: &'a [String],
    /// nvcc's own version text, and the arguments that the environment adds to it.
    pub compiler: &'a str,
}

impl Inputs<'_> {
    /// The entry's name.
    pub fn key(&self) -> Result<Key, String> {
        let mut files = BTreeMap::new();
        read_with_includes(self.source, self.folder, &mut files)?;
        let mut hash = Sha256::new();
        // Each part with its length, so that no two lists of parts are the same bytes.
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(b"cubin 1");
        part(self.compiler.as_bytes());
        part(self.source.to_string_lossy().as_bytes());
        part(&(self.flags.len() as u64).to_le_bytes());
        self.flags.iter().for_each(|flag| part(flag.as_bytes()));
        for (path, text) in &files {
            part(path.to_string_lossy().as_bytes());
            part(text.as_bytes());
        }
        Ok(Key(hash.finalize().iter().map(|b| format!("{b:02x}")).collect()))
    }
}

/// Reads a file, and all that it includes from beside itself or from `folder`, transitively. What lies elsewhere is the
/// toolkit's, for which nvcc's version stands.
fn read_with_includes(file: &Path, folder: &Path, files: &mut BTreeMap<PathBuf, String>) -> Result<(), String> {
    if files.contains_key(file) {
        return Ok(());
    }
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let included: Vec<String> = text
        .lines()
        .filter_map(|line| included(line).transpose())
        .collect::<Result<_, _>>()
        .map_err(|line| format!("{}: cannot tell what this includes: {line}", file.display()))?;
    files.insert(file.to_path_buf(), text);
    for name in included {
        let beside = file.parent().unwrap_or(Path::new("")).join(&name);
        if let Some(found) = [beside, folder.join(&name)].into_iter().find(|path| path.is_file()) {
            read_with_includes(&found, folder, files)?;
        }
    }
    Ok(())
}

/// The file that a line includes; `Err` where a macro names it.
fn included(line: &str) -> Result<Option<String>, String> {
    let directive = line.trim_start().strip_prefix('#').map(str::trim_start);
    let Some(rest) = directive.and_then(|d| d.strip_prefix("include")) else { return Ok(None) };
    let rest = rest.trim_start();
    let end = if rest.starts_with('"') { '"' } else { '>' };
    match rest.strip_prefix(['"', '<']).and_then(|rest| rest.split_once(end)) {
        Some((name, _)) => Ok(Some(name.to_string())),
        None => Err(line.to_string()),
    }
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
