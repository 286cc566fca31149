//! Hostile and damaged folders: each is a typed error that names what is wrong, and none panics or hangs.

mod config;
mod files;
mod tensors;

use std::fs;
use std::path::Path;

use moebius::checkpoint::Checkpoint;
use moebius::cpu::Cpu;
use moebius::{CheckpointError, DType, Error, Tensor};
use serde_json::{Value, json};

use crate::support::*;

/// Kind of error that is expected.
#[derive(Debug, PartialEq)]
enum Kind {
    Io,
    Config,
    UnknownFamily,
    UnsupportedFamily,
    Header,
    TooLarge,
    OutsideFolder,
    Truncated,
    Missing,
    Unexpected,
    Tensor,
    Declaration,
    Invalid,
}

fn kind(error: &Error) -> Kind {
    match error {
        Error::Checkpoint(CheckpointError::Io { .. }) => Kind::Io,
        Error::Checkpoint(CheckpointError::Config { .. }) => Kind::Config,
        Error::Checkpoint(CheckpointError::UnknownFamily { .. }) => Kind::UnknownFamily,
        Error::Checkpoint(CheckpointError::UnsupportedFamily { .. }) => Kind::UnsupportedFamily,
        Error::Checkpoint(CheckpointError::Header { .. }) => Kind::Header,
        Error::Checkpoint(CheckpointError::TooLarge { .. }) => Kind::TooLarge,
        Error::Checkpoint(CheckpointError::OutsideFolder { .. }) => Kind::OutsideFolder,
        Error::Checkpoint(CheckpointError::Truncated { .. }) => Kind::Truncated,
        Error::Checkpoint(CheckpointError::Missing { .. }) => Kind::Missing,
        Error::Checkpoint(CheckpointError::Unexpected { .. }) => Kind::Unexpected,
        Error::Checkpoint(CheckpointError::Tensor { .. }) => Kind::Tensor,
        Error::Checkpoint(CheckpointError::Declaration { .. }) => Kind::Declaration,
        Error::Invalid { .. } => Kind::Invalid,
        other => panic!("{other}"),
    }
}

/// Opens a folder and loads a rank of its first block.
fn attempt(dir: &Path) -> moebius::Result<()> {
    let checkpoint = Checkpoint::open(dir)?;
    let layer = *checkpoint.moe_layers().first().ok_or_else(|| Error::Invalid {
        call: "test",
        name: "moe_layers".to_string(),
        expected: "one".to_string(),
        found: "none".to_string(),
    })?;
    checkpoint.load_block(layer, options(1, 2, None)).map(|_| ())
}

fn refuse(what: &str, dir: &Path, expected: Kind, words: &str) {
    let error = attempt(dir).expect_err(what);
    assert!(error.to_string().len() < 2000, "{what}: a file fills the log");
    assert_eq!(kind(&error), expected, "{what}: {error}");
    assert!(error.to_string().contains(words), "{what}: {error} does not say {words:?}");
}

fn copy(family: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::write(dir.path().join(name), fs::read(fixture(family).join(name)).unwrap()).unwrap();
    }
    attempt(dir.path()).unwrap();
    dir
}

/// A file with this header and `data` bytes.
fn headed(header: &[u8], data: usize) -> Vec<u8> {
    [(header.len() as u64).to_le_bytes().as_slice(), header, &vec![0; data]].concat()
}

/// Arguments that do not fit.
#[test]
fn arguments() {
    let checkpoint = Checkpoint::open(fixture("qwen2_moe")).unwrap();
    for (layer, rank, ranks, dtype, words) in [
        (1, 0, 0, None, "ranks"),
        (1, 0, 3, None, "divisor of 8"),
        (1, 2, 2, None, "0..2"),
        (0, 0, 1, None, "layer"),
        (9, 0, 1, None, "layer"),
        (1, 0, 1, Some(DType::I64), "floating"),
    ] {
        let options = options(rank, ranks, dtype);
        let loads = [
            checkpoint.load_block(layer, options).map(drop),
            checkpoint.load_quantized(layer, options).map(drop),
            checkpoint.block_bytes(layer, options).map(drop),
        ];
        for error in loads.map(Result::unwrap_err) {
            assert_eq!(kind(&error), Kind::Invalid, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
    assert!(checkpoint.tensor("no.such", None).unwrap_err().to_string().contains("no.such"));
    assert!(checkpoint.tensor("lm_head.weight", Some(DType::U8)).is_err());
    let share = |rank| checkpoint.load_block(1, options(rank, 2, None)).unwrap().params;
    let mut block = share(0);
    assert!(checkpoint.disk_tensors(1, &block, 0, 1).unwrap_err().to_string().contains("up"));
    assert!(checkpoint.save(std::env::temp_dir().join("moebius-never"), &[block.at_layer(1)]).is_err());
    assert!(moebius::checkpoint::gather_blocks(Vec::new()).is_err());
    // A tensor that some ranks have: not dropped in silence.
    for with in 0..2 {
        let mut shares = [share(0), share(1)];
        shares[with].others.up_bias = Some(Tensor::zeros(&Cpu::new(), DType::F32, &[4, 2]).unwrap());
        let error = moebius::checkpoint::gather_blocks(shares.into()).unwrap_err().to_string();
        assert!(error.contains("experts.up_bias") && error.contains("1 of 2 ranks"), "{error}");
    }
    block.up = Tensor::zeros(&Cpu::new(), DType::I32, block.up.dims()).unwrap();
    let error = checkpoint.disk_tensors(1, &block, 0, 2).unwrap_err().to_string();
    assert!(error.contains("experts.up") && error.contains("i32"), "{error}");
}

fn clip(value: &Value) -> String {
    value.to_string().chars().take(40).collect()
}
