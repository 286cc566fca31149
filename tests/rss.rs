//! Peak memory: of a process that loads one rank of eight, and reads its own experts only; of processes that open
//! hostile files, and refuse them before they take memory.
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

/// Work of the child: loads its share of every layer, keeps it, and says by how much the peak grew.
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

const HOSTILE: &str = "MOEBIUS_RSS_HOSTILE";

/// A header of this text, in a file with nothing behind it.
fn headed(json: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json].concat()
}

/// Files of a hostile folder, beside a good config.json or in its place, and by how much memory may grow: the bytes of
/// what has to be read to be refused, and what a process takes anyway.
fn hostile() -> Vec<(&'static str, &'static str, Vec<u8>, u64)> {
    const MIB: u64 = 1 << 20;
    let repeated = |text: &str, bytes: usize| text.repeat(bytes / text.len());
    let nested = |bytes| format!("[{}{{}}]", repeated("{\"\":{}},", bytes));
    let pairs = |bytes: usize, entry: fn(usize) -> String| {
        let mut text = String::with_capacity(bytes + 100);
        for n in 0.. {
            if text.len() > bytes {
                return text;
            }
            text += &entry(n);
            text.push(',');
        }
        text
    };
    let metadata = pairs(60 << 20, |n| format!("\"{n}\":\"\""));
    let metadata = format!("{{\"__metadata__\":{{{metadata}\"end\":\"\"}}}}");
    let shape =
        format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{}1],\"data_offsets\":[0,0]}}}}", "1,".repeat(30 << 20));
    let tensors = pairs(60 << 20, |n| format!("\"{n}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,0]}}"));
    let tensors = format!("{{{tensors}\"end\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,0]}}}}");
    let map = pairs(60 << 20, |n| format!("\"{n}\":\"a\""));
    let (index, file) = ("model.safetensors.index.json", "model.safetensors");
    vec![
        ("a config of 16 MiB", "config.json", nested(16 << 20).into_bytes(), 8 * MIB),
        ("a config of many objects", "config.json", nested((4 << 20) - 64).into_bytes(), 16 * MIB),
        ("a config of one key", "config.json", format!("{{\"{}\":0}}", "k".repeat(4_000_000)).into_bytes(), 16 * MIB),
        ("a header of metadata", file, headed(metadata.as_bytes()), 72 * MIB),
        ("a header of one string", file, headed(format!("{{\"{}\":0}}", "k".repeat(60 << 20)).as_bytes()), 72 * MIB),
        ("a header of one shape", file, headed(shape.as_bytes()), 72 * MIB),
        ("a header of many tensors", file, headed(tensors.as_bytes()), 72 * MIB),
        ("a header of 98 MB", file, headed(&vec![b' '; 98_000_000]), 8 * MIB),
        ("an index of 256 MB", index, vec![b' '; 256_000_000], 8 * MIB),
        (
            "an index of many tensors",
            index,
            format!("{{\"weight_map\":{{{map}\"end\":\"a\"}}}}").into_bytes(),
            72 * MIB,
        ),
    ]
}

#[test]
fn hostile_files_take_little_memory() {
    if let Ok(dir) = std::env::var(HOSTILE) {
        let before = peak();
        let error = Checkpoint::open(dir).unwrap_err().to_string();
        println!("rss {} {}", peak() - before, error.len());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 8, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 8});
    for (what, name, bytes, limit) in hostile() {
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        std::fs::write(dir.path().join(name), &bytes).unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "hostile_files_take_little_memory", "--nocapture"])
            .env(HOSTILE, dir.path())
            .output()
            .unwrap();
        std::fs::remove_file(dir.path().join(name)).unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{what}: {text}{}", String::from_utf8_lossy(&output.stderr));
        let line = text.lines().find_map(|line| line.split_once("rss ")).unwrap().1;
        let mut numbers = line.split_whitespace().map(|n| n.parse::<u64>().unwrap());
        let (grown, message) = (numbers.next().unwrap(), numbers.next().unwrap());
        println!("{what}: {} bytes, peak grew by {grown}, limit {limit}", bytes.len());
        assert!(grown <= limit, "{what}: peak grew by {grown} bytes, the limit is {limit}");
        assert!(message < 2000, "{what}: a message of {message} bytes");
    }
}
