//! Checkpoints: every shipped folder, both on-disk forms, sharded and damaged files, and back to disk.

mod checkpoint_support;

use std::path::PathBuf;

use checkpoint_support::*;
use moebius::DType;
use moebius::checkpoint::{Checkpoint, LoadOptions, gather_blocks};

fn options(rank: usize, ranks: usize, dtype: Option<DType>) -> LoadOptions {
    LoadOptions { rank, ranks, dtype }
}

/// The shipped folders.
fn golden() -> Vec<PathBuf> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(&root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("config.json").exists())
        .collect();
    folders.sort();
    assert!(folders.len() >= 14, "shipped folders in {}: {}", root.display(), folders.len());
    folders
}

/// Every shipped folder at R = 1, 2, 4, 8: the ranks' shares joined are the one-rank load.
#[test]
fn shipped_folders_load_on_any_number_of_ranks() {
    for dir in golden() {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        for &layer in checkpoint.moe_layers() {
            let config = checkpoint.block_config(layer).unwrap();
            let whole = checkpoint.load_block(layer, options(0, 1, None)).unwrap().params;
            for ranks in [2, 4, 8].into_iter().filter(|r| config.router.num_experts.is_multiple_of(*r)) {
                let share = |rank| checkpoint.load_block(layer, options(rank, ranks, None)).unwrap().params;
                let joined = gather_blocks((0..ranks).map(share).collect()).unwrap();
                assert_same(&whole, &joined, &format!("{} R={ranks}", dir.display()));
            }
        }
    }
}

/// The inverse of a load names and orders every tensor of the block as the file does, and the other way round.
#[test]
fn disk_tensors_invert_load() {
    for dir in golden() {
        let file = raw(&dir.join("model.safetensors"));
        let checkpoint = Checkpoint::open(&dir).unwrap();
        for &layer in checkpoint.moe_layers() {
            let block = checkpoint.load_block(layer, options(0, 1, None)).unwrap();
            let tensors = checkpoint.disk_tensors(layer, &block.params, 0, 1).unwrap();
            let prefix = checkpoint.block_prefix(layer).unwrap();
            let quantised = checkpoint.block_form(layer).unwrap().is_quantised();
            for (name, tensor) in &tensors {
                assert!(name.starts_with(&prefix), "{name}");
                match file.get(name).filter(|t| t.dtype == tensor.dtype().name()) {
                    Some(stored) => {
                        assert_eq!(tensor.dims(), stored.shape, "{name}");
                        assert!(tensor.as_bytes() == stored.data, "{}: {name}", dir.display());
                    }
                    None => {
                        assert!(quantised, "{name} is not in {}", dir.display());
                        let dtype = Some(tensor.dtype());
                        assert_eq!(tensor.as_bytes(), checkpoint.tensor(name, dtype).unwrap().as_bytes(), "{name}");
                    }
                }
            }
            if !quantised {
                let expected: Vec<&String> = file.keys().filter(|name| name.starts_with(&prefix)).collect();
                assert_eq!(tensors.iter().map(|(name, _)| name).collect::<Vec<_>>(), expected);
            }
        }
    }
}

/// De-quantised weights are the reference's bit for bit.
#[test]
fn dequantised_weights_are_exact() {
    let mut compared = 0;
    for dir in golden() {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        for (name, expected) in raw(&dir.join("golden.safetensors")) {
            let Some(name) = name.strip_prefix("dequant.") else { continue };
            let tensor = checkpoint.tensor(name, Some(DType::F32)).unwrap();
            assert_eq!(tensor.dims(), expected.shape, "{name}");
            assert!(tensor.as_bytes() == expected.data, "{}: {name}", dir.display());
            compared += 1;
        }
    }
    // 6 of the FP8 folder, 2 of MXFP4, 21 of NVFP4.
    assert!(compared >= 29, "{compared} tensors compared");
}
