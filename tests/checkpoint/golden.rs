//! Every shipped folder: load on any number of ranks, back to names on disk, saved and loaded again.

use moebius::DType;
use moebius::checkpoint::{BlockParams, Checkpoint, LayerBlock, SaveOptions, gather_blocks};

use crate::support::*;

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
            let quantized = checkpoint.block_form(layer).unwrap().is_quantized();
            for (name, tensor) in &tensors {
                assert!(name.starts_with(&prefix), "{name}");
                match file.get(name).filter(|t| t.dtype == tensor.dtype().name()) {
                    Some(stored) => {
                        assert_eq!(tensor.dims(), stored.shape, "{name}");
                        assert!(tensor.as_bytes() == stored.data, "{}: {name}", dir.display());
                    }
                    None => {
                        assert!(quantized, "{name} is not in {}", dir.display());
                        let dtype = Some(tensor.dtype());
                        assert_eq!(tensor.as_bytes(), checkpoint.tensor(name, dtype).unwrap().as_bytes(), "{name}");
                    }
                }
            }
            if !quantized {
                let expected: Vec<&String> = file.keys().filter(|name| name.starts_with(&prefix)).collect();
                assert_eq!(tensors.iter().map(|(name, _)| name).collect::<Vec<_>>(), expected);
            }
        }
    }
}

/// De-quantized weights are the reference's bit for bit.
#[test]
fn dequantized_weights_are_exact() {
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

/// load(save(x)) is x, bit for bit: with blocks gathered from four ranks, from another folder and over the source.
#[test]
fn save_and_load_give_the_same_bits() {
    for source in golden() {
        let target = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&source).unwrap();
        let layers = checkpoint.moe_layers().to_vec();
        let share = |layer, rank| checkpoint.load_block(layer, options(rank, 4, None)).unwrap().params;
        let blocks: Vec<(usize, BlockParams)> = layers
            .iter()
            .map(|layer| (*layer, gather_blocks((0..4).map(|rank| share(*layer, rank)).collect()).unwrap()))
            .collect();
        let borrowed: Vec<LayerBlock<'_>> = blocks.iter().map(|(layer, block)| block.at_layer(*layer)).collect();
        // The second round writes into the folder that it reads.
        let mut from = checkpoint;
        let mut replace = SaveOptions::default();
        replace.replace_source = true;
        for round in 0..2 {
            from.save_with(target.path(), &borrowed, replace).unwrap();
            let what = format!("{} round {round}", source.display());
            let saved = Checkpoint::open(target.path()).unwrap();
            assert_eq!(saved.moe_layers(), layers);
            for (layer, block) in &blocks {
                assert_same(block, &saved.load_block(*layer, options(0, 1, None)).unwrap().params, &what);
            }
            let (before, after) =
                (raw(&source.join("model.safetensors")), raw(&target.path().join("model.safetensors")));
            let prefixes: Vec<String> = layers.iter().map(|l| saved.block_prefix(*l).unwrap()).collect();
            let others = |name: &&String| !prefixes.iter().any(|prefix| name.starts_with(prefix));
            if before.keys().any(|name| name.ends_with("_scale_inv")) {
                // Attention was quantized too and is written de-quantized.
                assert!(after.keys().all(|name| !name.ends_with("_scale_inv")), "{what}");
                let name = "model.layers.0.self_attn.o_proj.weight";
                assert_eq!(from.tensor(name, None).unwrap().as_bytes(), after[name].data, "{what}");
            } else {
                assert_eq!(
                    before.keys().filter(others).collect::<Vec<_>>(),
                    after.keys().filter(others).collect::<Vec<_>>()
                );
                for name in before.keys().filter(others) {
                    assert!(before[name] == after[name], "{what}: {name}");
                }
            }
            assert!(saved.config().get("quantization_config").is_none(), "{what}");
            let left: Vec<String> = files(target.path());
            assert_eq!(left, ["config.json", "model.safetensors"], "{what}: no temporary files stay");
            from = saved;
        }
    }
}

/// Progress counts up to the whole and names tensors on disk.
#[test]
fn progress_ends_at_the_total() {
    let checkpoint = Checkpoint::open(fixture("qwen2_moe")).unwrap();
    let mut seen = Vec::new();
    let block = checkpoint
        .load_block_with(1, options(1, 2, None), &mut |p| seen.push((p.layer, p.tensor.to_string(), p.done, p.total)))
        .unwrap();
    // Router, three shared matrices, their gate, and three matrices for each of four experts.
    assert_eq!(seen.len(), 1 + 3 + 1 + 3 * 4);
    assert!(seen.windows(2).all(|pair| pair[0].2 < pair[1].2 && pair[0].3 == pair[1].3));
    let (layer, tensor, done, total) = seen.last().unwrap();
    assert_eq!((*layer, tensor.as_str(), done), (1, "model.layers.1.mlp.experts.7.down_proj.weight", total));
    let bytes = checkpoint.block_bytes(1, options(1, 2, None)).unwrap();
    assert_eq!(bytes.experts + bytes.replicated, *total);
    assert_eq!(bytes.experts as usize, block.params.up.bytes() + block.params.down.bytes());
    // F32 on disk as in memory.
    assert_eq!(bytes.disk, *total);
}
