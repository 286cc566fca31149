//! A rank reads its own experts only: peak memory of a process that loads one rank of eight.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use moebius::DType;
use moebius::checkpoint::{Checkpoint, LoadOptions};
use serde_json::{Value, json};

const LAYERS: usize = 3;
const EXPERTS: usize = 64;
const HIDDEN: usize = 2048;
const INNER: usize = 1024;
const RANK: usize = 3;
const RANKS: usize = 8;
const DIR: &str = "MOEBIUS_RSS_DIR";
const TYPE: &str = "MOEBIUS_RSS_DTYPE";

/// Writes a checkpoint of 2.4 GB with holes for zeros, so that it takes neither time nor disk. The first element of
/// each matrix is its expert's number plus one.
fn generate(dir: &Path) -> u64 {
    let config = json!({"model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN,
        "num_experts": EXPERTS, "num_experts_per_tok": 8, "moe_intermediate_size": INNER, "norm_topk_prob": true,
        "torch_dtype": "bfloat16"});
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut header = serde_json::Map::new();
    let mut marks = Vec::new();
    let mut end = 0u64;
    let mut put = |name: String, shape: [usize; 2], expert: usize| {
        let bytes = (shape[0] * shape[1] * 2) as u64;
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [end, end + bytes]}));
        marks.push((end, half::bf16::from_f32(expert as f32 + 1.0)));
        end += bytes;
    };
    for layer in 0..LAYERS {
        let block = format!("model.layers.{layer}.mlp");
        put(format!("{block}.gate.weight"), [EXPERTS, HIDDEN], 0);
        for e in 0..EXPERTS {
            put(format!("{block}.experts.{e}.gate_proj.weight"), [INNER, HIDDEN], e);
            put(format!("{block}.experts.{e}.up_proj.weight"), [INNER, HIDDEN], e);
            put(format!("{block}.experts.{e}.down_proj.weight"), [HIDDEN, INNER], e);
        }
    }
    let header = Value::Object(header).to_string();
    let file = File::create(dir.join("model.safetensors")).unwrap();
    let data = 8 + header.len() as u64;
    file.set_len(data + end).unwrap();
    file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).unwrap();
    file.write_all_at(header.as_bytes(), 8).unwrap();
    for (at, mark) in marks {
        file.write_all_at(&mark.to_le_bytes(), data + at).unwrap();
    }
    data + end
}

/// Peak resident memory of this process, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

/// What the child does: loads its share of every layer, keeps it, and says by how much the peak grew.
fn child(dir: &str) {
    let dtype = std::env::var(TYPE).is_ok_and(|name| name == "f32").then_some(DType::F32);
    let before = peak();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let load = |layer| checkpoint.load_block(layer, LoadOptions { rank: RANK, ranks: RANKS, dtype }).unwrap();
    let blocks: Vec<_> = (0..LAYERS).map(load).collect();
    let grown = peak() - before;
    let bytes: usize = blocks.iter().map(|b| b.params.up.bytes() + b.params.down.bytes()).sum();
    for block in &blocks {
        let local = EXPERTS / RANKS;
        let down = block.params.down.to_f64();
        for e in 0..local {
            assert_eq!(down[e * HIDDEN * INNER], (RANK * local + e + 1) as f64);
        }
    }
    println!("rss {grown} {bytes}");
}

#[test]
fn a_rank_reads_only_its_experts() {
    if let Ok(dir) = std::env::var(DIR) {
        return child(&dir);
    }
    let dir = tempfile::tempdir().unwrap();
    let size = generate(dir.path());
    assert!(size > 2 << 30, "{size} bytes");
    for dtype in ["bf16", "f32"] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_rank_reads_only_its_experts", "--nocapture"])
            .env(DIR, dir.path())
            .env(TYPE, dtype)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let line = text.lines().find_map(|line| line.split_once("rss ")).unwrap().1;
        let mut numbers = line.split_whitespace().map(|n| n.parse::<u64>().unwrap());
        let (grown, bytes) = (numbers.next().unwrap(), numbers.next().unwrap());
        let element = if dtype == "f32" { 4 } else { 2 };
        let expected = (LAYERS * EXPERTS / RANKS * 3 * INNER * HIDDEN * element) as u64;
        assert_eq!(bytes, expected, "the rank's experts in memory");
        let limit = bytes + bytes / 10 + (64 << 20);
        println!("{dtype}: checkpoint {size} bytes, experts {bytes}, peak grew by {grown}, limit {limit}");
        assert!(grown <= limit, "{dtype}: peak grew by {grown} bytes, the limit is {limit} for {bytes} of experts");
        // Filled memory is resident: less would mean that this measures nothing.
        assert!(grown >= bytes, "{dtype}: peak grew by {grown} bytes for {bytes} of experts");
    }
}
