//! Text as bytes, and batches of it.

use std::error::Error;
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::lm::fingerprint;

/// A text to train on.
pub struct Corpus {
    bytes: Vec<u8>,
}

impl Corpus {
    /// Reads a file; without one, this crate's own sources, one after another.
    pub fn load(text: Option<&Path>) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let bytes = match text {
            Some(path) => std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?,
            None => {
                let (mut files, own) = (Vec::new(), Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
                sources(&own, &mut files)
                    .map_err(|e| format!("{}: {e}; name another text with --text", own.display()))?;
                files.sort();
                let mut all = Vec::new();
                for file in files {
                    all.extend(std::fs::read(file)?);
                }
                all
            }
        };
        Ok(Self { bytes })
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// A number that another text has another of.
    pub fn fingerprint(&self) -> u64 {
        fingerprint(self.bytes.iter().map(|byte| u64::from(*byte)))
    }

    /// `rows` pieces of `length` bytes each, row-major, from places that seed and step alone decide.
    pub fn batch(&self, seed: u64, step: usize, rows: usize, length: usize) -> Result<Vec<u8>, String> {
        if self.bytes.len() < length {
            return Err(format!("the text has {} bytes; one sequence needs {length}", self.bytes.len()));
        }
        let mut rng = StdRng::seed_from_u64(seed ^ (step as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let starts = (0..rows).map(|_| rng.random_range(0..=self.bytes.len() - length));
        Ok(starts.flat_map(|s| &self.bytes[s..s + length]).copied().collect())
    }
}

fn sources(dir: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
