//! Shards from checkpoints, and back at another number of ranks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moebius::DType;
use moebius::checkpoint::{BlockParams, Checkpoint, LoadOptions, ShardOptions, gather_blocks};
use moebius::cpu::Cpu;
use moebius::etp::{EtpOptions, Shard, Shards, WeightSpec};
use moebius::layer::ParamKind;

use super::test_ranks::{MINUTE, ranks};
use super::world::Tensor;

fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut all: Vec<PathBuf> = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.retain(|path| path.join("config.json").exists());
    all.sort();
    assert!(all.len() >= 14);
    all
}

/// Every family and form: per expert and fused, (out, in) and (in, out), plain and quantized.
#[test]
fn shards_join_to_the_block() {
    for dir in folders() {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let layer = checkpoint.moe_layers()[0];
        for (ep, n, pad, dtype) in [(1, 1, 16, None), (2, 2, 16, None), (1, 4, 0, Some(DType::F32)), (1, 3, 1, None)] {
            let options = LoadOptions { rank: ep - 1, ranks: ep, dtype };
            let whole = checkpoint.load_block(layer, options).unwrap().params;
            let load =
                |rank| checkpoint.load_shard(layer, options, ShardOptions { rank, ranks: n, pad }).unwrap().params;
            let parts: Vec<BlockParams> = (0..n).map(load).collect();
            for kind in ParamKind::ALL {
                let Some(expected) = whole.get(kind) else { continue };
                if !matches!(kind, ParamKind::Up | ParamKind::Down) {
                    assert!(parts.iter().all(|p| p.get(kind).unwrap().as_bytes() == expected.as_bytes()), "{kind:?}");
                    continue;
                }
                let cut = Shards::new(expected.dims(), n, pad).unwrap();
                let joined: Vec<u8> = parts.iter().flat_map(|p| p.get(kind).unwrap().as_bytes().to_vec()).collect();
                let (found, tail) = joined.split_at(expected.bytes());
                let what = format!("{} {kind:?}, EP {ep}, ETP {n}", dir.display());
                assert!(found == expected.as_bytes(), "{what}");
                assert_eq!(tail.len(), cut.padding() * cut.shard_dims()[1] * expected.dtype().size(), "{what}");
                assert!(tail.iter().all(|byte| *byte == 0), "{what}");
            }
        }
    }
}

#[test]
fn a_shard_that_there_is_not() {
    let checkpoint = Checkpoint::open(&folders()[0]).unwrap();
    let options = LoadOptions { rank: 0, ranks: 1, dtype: None };
    for (rank, ranks) in [(2, 2), (0, 0)] {
        let shard = ShardOptions { rank, ranks, pad: 16 };
        assert!(checkpoint.load_shard(checkpoint.moe_layers()[0], options, shard).is_err());
    }
}

/// Loaded over four ranks, saved, loaded over two, saved: the same file.
#[test]
fn saved_at_one_size_and_loaded_at_another() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_moe");
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (from, n, to) in [(source.as_path(), 4, first.path()), (first.path(), 2, second.path())] {
        let checkpoint = Checkpoint::open(from).unwrap();
        let saved = ranks(&Cpu::new(), n, MINUTE, |rank, place| {
            let chain = place.chain(EtpOptions::default()).unwrap();
            let mut blocks = Vec::new();
            for &layer in checkpoint.moe_layers() {
                let options = LoadOptions { rank: 0, ranks: 1, dtype: None };
                let shard = ShardOptions { rank, ranks: n, pad: chain.options().pad };
                let block = checkpoint.load_shard(layer, options, shard).unwrap();
                let mut params = block.params;
                for (kind, part) in [(ParamKind::Up, &mut params.up), (ParamKind::Down, &mut params.down)] {
                    let dims = kind.dims(&block.config, block.config.router.num_experts).unwrap();
                    let dtype = part.dtype();
                    let own = std::mem::replace(part, Tensor::zeros(&Cpu::new(), dtype, &[0]).unwrap());
                    let spec = WeightSpec::new(kind.name(), layer as u32, &dims, dtype);
                    let id = chain.add(spec, Arc::new(Shard::new(own))).unwrap();
                    *part = chain.whole(id).unwrap();
                }
                blocks.push((layer, gather_blocks(vec![params]).unwrap()));
            }
            if rank == 0 {
                let blocks: Vec<_> = blocks.iter().map(|(layer, params)| (*layer, params)).collect();
                checkpoint.save(to, &blocks).unwrap();
            }
            blocks.len()
        });
        assert!(saved[0] > 0);
    }
    let file = |dir: &Path| std::fs::read(dir.join("model.safetensors")).unwrap();
    assert!(file(first.path()) == file(second.path()));
    let (before, after) = (Checkpoint::open(&source).unwrap(), Checkpoint::open(second.path()).unwrap());
    for name in before.names() {
        let tensor = |c: &Checkpoint| c.tensor(name, None).unwrap().as_bytes().to_vec();
        assert!(tensor(&before) == tensor(&after), "{name}");
    }
}
