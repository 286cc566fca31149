//! Hostile and damaged folders: each is a typed error that names what is wrong, and none panics or hangs.

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

#[test]
fn headers() {
    let one = |dtype: &str, shape: &str, offsets: &str| {
        headed(format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#).as_bytes(), 16)
    };
    let two = |first: &str, second: &str| {
        let tensor =
            |name: &str, offsets: &str| format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#);
        headed(format!("{{{},{}}}", tensor("a", first), tensor("b", second)).as_bytes(), 16)
    };
    let good = fs::read(fixture("qwen3_moe").join("model.safetensors")).unwrap();
    let mut long = good.clone();
    long[..8].copy_from_slice(&(good.len() as u64).to_le_bytes());
    let mut huge = good.clone();
    huge[..8].fill(255);
    let mut limit = good.clone();
    limit[..8].copy_from_slice(&100_000_001u64.to_le_bytes());
    let mut text = good.clone();
    text[8] = 0xFF;
    let same = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#;
    let empty = r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty file", Vec::new(), "0 bytes"),
        ("four bytes", good[..4].to_vec(), "4 bytes"),
        ("length beyond the file", long, "claims"),
        ("length of 2^64 - 1", huge, "claims"),
        ("length over the format's limit", limit, "claims"),
        ("cut in the header", good[..100].to_vec(), "claims"),
        ("cut in the tensors", good[..good.len() - 1].to_vec(), "tensors end"),
        ("bytes behind the tensors", [good.as_slice(), &[0]].concat(), "tensors end"),
        ("no text", text, ""),
        ("no JSON", headed(b"{\"a\":", 0), ""),
        ("an array", headed(b"[]", 0), ""),
        ("deep nesting", headed("[".repeat(100_000).as_bytes(), 0), ""),
        ("deep nesting in a value", headed(format!("{{\"a\":{}", "[".repeat(100_000)).as_bytes(), 0), ""),
        ("overlap", two("[0,8]", "[4,12]"), "offset"),
        ("gap", two("[0,8]", "[9,17]"), "offset"),
        ("equal places", two("[0,8]", "[0,8]"), "offset"),
        ("end before begin", one("F32", "[4]", "[16,0]"), "offset"),
        ("first tensor not at 0", one("F32", "[2]", "[8,16]"), "offset"),
        ("offsets beyond the file", one("F32", "[1000]", "[0,4000]"), "tensors end"),
        ("negative offset", one("F32", "[4]", "[-1,16]"), ""),
        ("offset over 64 bits", one("F32", "[4]", "[0,99999999999999999999]"), ""),
        ("shape overflows", one("F32", "[4294967296,4294967296,2]", "[0,16]"), "tensor a, F32 of shape [4294967296"),
        ("bytes overflow", one("F32", "[4611686018427387904]", "[0,16]"), "overflow"),
        ("overflow hidden by a zero", one("F32", "[4294967296,4294967296,0]", "[0,0]"), "overflow"),
        ("negative size", one("F32", "[-4]", "[0,16]"), "tensor a: "),
        ("size of the type", one("F64", "[4]", "[0,16]"), "tensor a, F64 of shape [4] at bytes 0..16"),
        (
            "a shape of many sizes",
            one("F32", &format!("[{}1]", "1,".repeat(100_000)), "[0,16]"),
            "a longer array (limit 16)",
        ),
        ("a shape of 17 sizes", one("F32", &format!("[{}1]", "1,".repeat(16)), "[0,16]"), "a longer array (limit 16)"),
        ("a long type", one(&"F".repeat(1 << 20), "[4]", "[0,16]"), "tensor a: unknown variant"),
        ("half a byte", one("F4", "[3]", "[0,16]"), "tensor a, F4 of shape [3]"),
        ("unknown type", one("F99", "[4]", "[0,16]"), "F99"),
        ("a name twice", headed(same.as_bytes(), 16), "twice"),
        ("a name twice, once empty", headed(empty.as_bytes(), 16), "twice"),
        (
            "a long name",
            headed(format!(r#"{{"{}":{{}}}}"#, "x".repeat(1 << 20)).as_bytes(), 0),
            "a key of 1048578 bytes",
        ),
        ("metadata twice", headed(br#"{"__metadata__":{"a":"1","a":"2"}}"#, 0), "twice"),
        (
            "long metadata",
            headed(format!(r#"{{"__metadata__":{{"a":"{}"}}}}"#, "x".repeat(2 << 20)).as_bytes(), 0),
            "a string of",
        ),
        ("metadata of numbers", headed(br#"{"__metadata__":{"a":1}}"#, 0), ""),
        ("no offsets", headed(br#"{"a":{"dtype":"F32","shape":[4]}}"#, 16), "data_offsets"),
    ];
    for (what, bytes, words) in cases {
        let dir = copy("qwen3_moe");
        fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        refuse(what, dir.path(), Kind::Header, words);
    }
}

#[test]
fn folders_and_indices() {
    let index = |dir: &Path, text: String| {
        fs::rename(dir.join("model.safetensors"), dir.join("a.safetensors")).unwrap();
        fs::write(dir.join("model.safetensors.index.json"), text).unwrap();
    };
    let tensors = raw(&fixture("qwen3_moe").join("model.safetensors"));
    let map = |file: &str| {
        let entries = tensors.keys().map(|name| (name.clone(), Value::from(file))).collect();
        json!({"weight_map": Value::Object(entries)}).to_string()
    };
    let outside = tempfile::tempdir().unwrap();
    fs::copy(fixture("qwen3_moe").join("model.safetensors"), outside.path().join("a.safetensors")).unwrap();
    let absolute = outside.path().join("a.safetensors").display().to_string();
    let up = format!("../{}/a.safetensors", outside.path().file_name().unwrap().to_str().unwrap());
    let extra = map("a.safetensors").replacen('{', r#"{"weight_map":{"b":"a.safetensors"},"#, 1);
    let twice = r#"{"weight_map":{"a":"a.safetensors","a":"a.safetensors"}}"#.to_string();
    let none = r#"{"weight_map":{"no.such.tensor":"a.safetensors"}}"#.to_string();
    let many: Value = (0..5000).map(|n| (format!("t{n}"), Value::from(format!("{n}.safetensors")))).collect();
    let cases: Vec<(&str, String, Kind, &str)> = vec![
        ("absolute path", map(&absolute), Kind::OutsideFolder, "plain file name"),
        ("up and out", map(&up), Kind::OutsideFolder, "plain file name"),
        ("..", map(".."), Kind::OutsideFolder, "plain file name"),
        (".", map("."), Kind::OutsideFolder, "plain file name"),
        ("nothing", map(""), Kind::OutsideFolder, "plain file name"),
        ("trailing slash", map("a.safetensors/"), Kind::OutsideFolder, "plain file name"),
        ("a folder within", map("sub/a.safetensors"), Kind::OutsideFolder, "plain file name"),
        ("a zero byte", map("a\0.safetensors"), Kind::Io, ""),
        ("missing shard", map("b.safetensors"), Kind::Io, "b.safetensors"),
        ("a directory", map("sub"), Kind::Io, "regular file"),
        ("tensor not in its shard", none, Kind::Missing, "no.such.tensor"),
        ("a name twice", twice, Kind::Config, "twice"),
        ("two maps", extra, Kind::Config, "twice"),
        ("no map", "{}".to_string(), Kind::Config, "weight_map"),
        ("no JSON", "{".to_string(), Kind::Config, "weight_map"),
        ("a map of numbers", r#"{"weight_map":{"a":1}}"#.to_string(), Kind::Config, ""),
        ("deep nesting", format!("{{\"x\":{}", "[".repeat(100_000)), Kind::Config, ""),
        ("thousands of files", json!({"weight_map": many}).to_string(), Kind::Io, ""),
        ("an empty map", r#"{"weight_map":{}}"#.to_string(), Kind::Missing, "mlp.gate.weight"),
    ];
    for (what, text, expected, words) in cases {
        let dir = copy("qwen3_moe");
        fs::create_dir(dir.path().join("sub")).unwrap();
        index(dir.path(), text);
        refuse(what, dir.path(), expected, words);
    }
    #[cfg(unix)]
    {
        let dir = copy("qwen3_moe");
        index(dir.path(), map("link.safetensors"));
        std::os::unix::fs::symlink(&absolute, dir.path().join("link.safetensors")).unwrap();
        refuse("a link out of the folder", dir.path(), Kind::OutsideFolder, "link");
        for name in ["model.safetensors", "config.json"] {
            let dir = copy("qwen3_moe");
            let real = outside.path().join(name);
            fs::rename(dir.path().join(name), &real).unwrap();
            std::os::unix::fs::symlink(&real, dir.path().join(name)).unwrap();
            refuse("a file that is a link out", dir.path(), Kind::OutsideFolder, "OpenOptions::follow_links");
        }
        let dir = copy("qwen3_moe");
        fs::rename(dir.path().join("model.safetensors"), dir.path().join("a.safetensors")).unwrap();
        fs::write(outside.path().join("index"), map("a.safetensors")).unwrap();
        let name = "model.safetensors.index.json";
        std::os::unix::fs::symlink(outside.path().join("index"), dir.path().join(name)).unwrap();
        refuse("an index that is a link out", dir.path(), Kind::OutsideFolder, name);
        let dir = copy("qwen3_moe");
        index(dir.path(), map("link.safetensors"));
        std::os::unix::fs::symlink("a.safetensors", dir.path().join("link.safetensors")).unwrap();
        attempt(dir.path()).expect("a link within the folder");
    }
    let empty = tempfile::tempdir().unwrap();
    refuse("an empty folder", empty.path(), Kind::Io, "config.json");
    refuse("no folder", &empty.path().join("none"), Kind::Io, "none");
    fs::copy(fixture("qwen3_moe").join("config.json"), empty.path().join("config.json")).unwrap();
    refuse("no tensors", empty.path(), Kind::Io, "neither");
    fs::create_dir(empty.path().join("model.safetensors")).unwrap();
    refuse("a folder as file", empty.path(), Kind::Io, "regular file");
}

#[test]
fn configurations() {
    let huge = 1u64 << 40;
    let set = |family: &'static str, key: &'static str, value: Value| (family, key, value);
    let cases: Vec<((&str, &str, Value), Kind, &str)> = vec![
        (set("qwen3_moe", "model_type", json!("gpt2")), Kind::UnknownFamily, "qwen3_moe"),
        (set("qwen3_moe", "model_type", json!("x".repeat(1 << 20))), Kind::UnknownFamily, "xxx"),
        (set("qwen3_moe", "model_type", json!("ernie4_5_vl_moe")), Kind::UnsupportedFamily, "one for images"),
        (set("qwen3_moe", "model_type", json!("deepseek_v4")), Kind::UnsupportedFamily, "sqrt(softplus)"),
        (set("qwen3_moe", "model_type", json!(null)), Kind::Config, "model_type"),
        (set("qwen3_moe", "model_type", json!(3)), Kind::Config, "model_type"),
        (set("qwen3_moe", "num_local_experts", json!(0)), Kind::Config, "num_local_experts"),
        (set("qwen3_moe", "num_local_experts", json!(65537)), Kind::Config, "65536"),
        (set("qwen3_moe", "num_local_experts", json!(huge)), Kind::Config, "num_local_experts"),
        (set("qwen3_moe", "num_local_experts", json!(null)), Kind::Config, "num_experts"),
        (set("qwen3_moe", "num_local_experts", json!("8")), Kind::Config, "num_local_experts"),
        (set("qwen3_moe", "num_local_experts", json!(8.5)), Kind::Config, "num_local_experts"),
        (set("qwen3_moe", "num_experts_per_tok", json!(9)), Kind::Config, "num_experts_per_tok"),
        (set("qwen3_moe", "num_experts_per_tok", json!(0)), Kind::Config, "num_experts_per_tok"),
        (set("qwen3_moe", "num_experts_per_tok", json!([3])), Kind::Config, "layer 1"),
        (set("qwen3_moe", "hidden_size", json!(huge)), Kind::Config, "hidden_size"),
        (set("qwen3_moe", "hidden_size", json!(-64)), Kind::Config, "hidden_size"),
        (set("qwen3_moe", "hidden_size", json!(u64::MAX)), Kind::Config, "hidden_size"),
        (set("qwen3_moe", "moe_intermediate_size", json!(huge)), Kind::Config, "moe_intermediate_size"),
        (set("qwen3_moe", "moe_intermediate_size", json!(null)), Kind::Config, "moe_intermediate_size"),
        (set("qwen3_moe", "num_hidden_layers", json!(huge)), Kind::Config, "num_hidden_layers"),
        (set("qwen3_moe", "num_hidden_layers", json!(0)), Kind::Config, "num_hidden_layers"),
        (set("qwen3_moe", "decoder_sparse_step", json!(0)), Kind::Config, "decoder_sparse_step"),
        (set("qwen3_moe", "mlp_only_layers", json!({})), Kind::Config, "mlp_only_layers"),
        (set("qwen3_moe", "norm_topk_prob", json!(1)), Kind::Config, "norm_topk_prob"),
        (set("qwen3_moe", "hidden_act", json!("gelu")), Kind::Config, "gelu"),
        (
            set("qwen3_moe", "quantization_config", json!({"weight_block_size": [0, 128]})),
            Kind::Config,
            "weight_block_size",
        ),
        (set("qwen3_moe", "mlp_layer_types", json!(["sparse"])), Kind::Config, "mlp_layer_types"),
        // Sizes that the tensors do not have.
        (set("qwen3_moe", "num_local_experts", json!(16)), Kind::Tensor, "mlp.gate.weight"),
        (set("qwen3_moe", "hidden_size", json!(1 << 20)), Kind::Tensor, "[8, 1048576]"),
        (set("qwen3_moe", "moe_intermediate_size", json!(1 << 22)), Kind::Tensor, "4194304"),
        (set("qwen3_moe", "decoder_sparse_step", json!(3)), Kind::Invalid, "moe_layers"),
        (set("qwen2_moe", "shared_expert_intermediate_size", json!(null)), Kind::Config, "shared_expert"),
        (set("qwen2_moe", "shared_expert_intermediate_size", json!(0)), Kind::Unexpected, "shared_expert"),
        (set("deepseek_v3", "n_group", json!(3)), Kind::Config, "groups"),
        (set("deepseek_v3", "n_group", json!(16)), Kind::Config, "n_group"),
        (set("deepseek_v3", "topk_group", json!(5)), Kind::Config, "topk_group"),
        (set("deepseek_v3", "scoring_func", json!("softmax")), Kind::Config, "sigmoid"),
        (set("deepseek_v3", "topk_method", json!("greedy")), Kind::Config, "noaux_tc"),
        (set("deepseek_v3", "routed_scaling_factor", json!("big")), Kind::Config, "routed_scaling_factor"),
        (set("deepseek_v3", "n_shared_experts", json!(1 << 22)), Kind::Config, "n_shared_experts"),
        (set("deepseek_v3", "moe_layer_freq", json!(0)), Kind::Config, "moe_layer_freq"),
        (set("deepseek_v2", "topk_method", json!("noaux_tc")), Kind::Config, "topk_method"),
        (set("llama4_top2", "moe_layers", json!([1, 7])), Kind::Config, "moe_layers"),
        (set("phimoe", "num_experts_per_tok", json!(3)), Kind::Config, "top_k"),
        (set("gpt_oss", "swiglu_limit", json!(-1.0)), Kind::Config, "limit"),
        (set("gpt_oss", "hidden_act", json!("gelu")), Kind::Config, "expected silu or swish, found \"gelu\""),
        (set("qwen3_moe", "hidden_act", json!({})), Kind::Config, "field hidden_act: expected a string"),
        (set("qwen3_moe", "hidden_act", json!({"name": "silu"})), Kind::Config, "field hidden_act"),
        (set("qwen3_moe", "hidden_act", json!(["silu"])), Kind::Config, "field hidden_act"),
        (set("qwen3_moe", "quantization_config", json!("fp8")), Kind::Config, "expected an object"),
        (set("qwen3_moe", "quantization_config", json!({"quant_method": 3})), Kind::Config, "quant_method"),
    ];
    for ((family, key, value), expected, words) in cases {
        let dir = copy(family);
        let mut changed = config(family);
        changed[key] = value.clone();
        fs::write(dir.path().join("config.json"), changed.to_string()).unwrap();
        refuse(&format!("{family}: {key} = {}", clip(&value)), dir.path(), expected, words);
    }
    // Wrappers keep the text model's keys, this one among them, in an object of their own.
    let dir = copy("qwen3_moe");
    let mut text = config("qwen3_moe");
    text["quantization_config"] = json!({"weight_block_size": [0, 128]});
    fs::write(dir.path().join("config.json"), json!({"model_type": "a_wrapper", "text_config": text}).to_string())
        .unwrap();
    refuse("a text model's own blocks", dir.path(), Kind::Config, "weight_block_size");
    // A wrapper of a family that is known by its text model's.
    let wrapper = json!({"model_type": "ernie4_5_vl_moe", "text_config": config("ernie4_5_moe")});
    fs::write(dir.path().join("config.json"), wrapper.to_string()).unwrap();
    refuse("a wrapper", dir.path(), Kind::UnsupportedFamily, "ernie4_5_vl_moe");
    for (what, text, expected) in [
        ("no JSON", "{".to_string(), Kind::Config),
        ("an array", "[]".to_string(), Kind::Config),
        ("a number", "3".to_string(), Kind::Config),
        ("deep nesting", "[".repeat(100_000), Kind::Config),
        ("5 MiB", " ".repeat(5 << 20), Kind::TooLarge),
        ("many values", format!("[{}{{}}]", "{},".repeat(70_000)), Kind::Config),
        ("nesting beyond the limit", format!("{{\"a\":{}{}}}", "[".repeat(40), "]".repeat(40)), Kind::Config),
        ("a long key", format!("{{\"{}\":1}}", "k".repeat(2000)), Kind::Config),
    ] {
        let dir = copy("qwen3_moe");
        fs::write(dir.path().join("config.json"), text).unwrap();
        refuse(what, dir.path(), expected, "config.json");
    }
    for (text, kind) in [("[1, 2]", "a list"), ("3", "a number"), ("\"a\"", "a string"), ("null", "null")] {
        let dir = copy("qwen3_moe");
        fs::write(dir.path().join("config.json"), text).unwrap();
        refuse(text, dir.path(), Kind::Config, &format!("expected an object, found {kind}"));
    }
    let dir = copy("qwen3_moe");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    refuse("no configuration", dir.path(), Kind::Io, "config.json: No such file or directory");
}

/// A key that comes twice is an error wherever it stands, as in a header and an index; the last one does not win.
#[test]
fn keys_that_come_twice() {
    for (from, to) in [
        ("{", r#"{"model_type": "mixtral","#),
        ("{", r#"{"x": [{"a": 1, "b": {"hidden\u005fsize": 1, "hidden_size": 2}}],"#),
    ] {
        let dir = copy("qwen3_moe");
        let text = config("qwen3_moe").to_string().replacen(from, to, 1);
        fs::write(dir.path().join("config.json"), text).unwrap();
        refuse("a key twice", dir.path(), Kind::Config, "comes twice");
    }
}

/// The files' declarations of quantization are held against the tensors.
#[test]
fn declarations_that_are_not_so() {
    let nvfp4 = "qwen3_moe_nvfp4_modelopt";
    let at = |family: &'static str, path: &'static str, value: Value, words: &'static str| (family, path, value, words);
    for (family, path, value, words) in [
        at(nvfp4, "/quant_algo", json!("FP8"), "field quant_algo: expected a name with NVFP4"),
        at(nvfp4, "/quant_method", json!("awq"), "found \"awq\""),
        at(nvfp4, "/group_size", json!(32), ""),
        at(nvfp4, "/config_groups/group_0/weights/group_size", json!(32), "field group_size: expected 16"),
        at("qwen3_moe_nvfp4_ct", "/quant_method", json!("modelopt"), "expected compressed-tensors"),
        at("qwen3_moe_nvfp4_ct", "/config_groups/group_0/weights/group_size", json!(128), "found 128"),
        at("gpt_oss_mxfp4", "/quant_method", json!("fp8"), "expected mxfp4"),
        at("deepseek_v3_fp8", "/quant_method", json!("mxfp4"), "expected fp8"),
        at("deepseek_v3_fp8", "/quant_algo", json!("NVFP4"), "a name with FP8"),
    ] {
        let dir = copy(family);
        let mut changed = config(family);
        let quantized = &mut changed["quantization_config"];
        match quantized.pointer_mut(path) {
            Some(place) => *place = value,
            None => quantized[&path[1..]] = value,
        }
        if path == "/group_size" {
            // One statement among several that agree: groups of layers may differ, so this alone is no contradiction.
            quantized.as_object_mut().unwrap().remove("config_groups");
        }
        fs::write(dir.path().join("config.json"), changed.to_string()).unwrap();
        refuse(&format!("{family}: {path}"), dir.path(), Kind::Declaration, words);
    }
    for (change, expected) in [
        (json!({"quantization": {"quant_algo": "FP8"}}), Some(Kind::Declaration)),
        (json!({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}), Some(Kind::Declaration)),
        (json!({"quantization": {"quant_algo": 4}}), Some(Kind::Config)),
        (json!({"quantization": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}), None),
        (json!({"quantization": {"quant_algo": "MIXED_PRECISION"}}), None),
    ] {
        let dir = copy(nvfp4);
        fs::write(dir.path().join("hf_quant_config.json"), change.to_string()).unwrap();
        match expected {
            Some(kind) => refuse(&change.to_string(), dir.path(), kind, "hf_quant_config.json"),
            None => attempt(dir.path()).unwrap(),
        }
    }
}

/// A save that was killed half-way is read where its files lie, but not out of the folder.
#[cfg(unix)]
#[test]
fn a_save_that_was_killed() {
    use std::os::unix::fs::symlink;
    let pending = |dir: &Path| {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("commit.json"), r#"{"files":["config.json","model.safetensors"],"stale":[]}"#).unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(fixture("mixtral").join(name), dir.join(name)).unwrap();
        }
    };
    let family = |dir: &Path| Checkpoint::open(dir).unwrap().family().to_string();
    let dir = copy("qwen3_moe");
    let staging = dir.path().join(".moebius-save");
    pending(&staging);
    assert_eq!(family(dir.path()), "mixtral");
    // One file has come to its place.
    fs::rename(staging.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    assert_eq!(family(dir.path()), "mixtral");
    attempt(dir.path()).unwrap();
    let outside = tempfile::tempdir().unwrap();
    symlink(fixture("mixtral").join("model.safetensors"), staging.join("model.safetensors")).unwrap();
    refuse("a link out of the staging folder", dir.path(), Kind::OutsideFolder, "model.safetensors");
    fs::remove_dir_all(&staging).unwrap();
    pending(outside.path());
    symlink(outside.path(), &staging).unwrap();
    fs::copy(fixture("qwen3_moe").join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    assert_eq!(family(dir.path()), "qwen3_moe");
    // A save goes by no link either.
    Checkpoint::open(fixture("qwen3_moe")).unwrap().save(dir.path(), &[]).unwrap();
    assert_eq!(files(dir.path()), ["config.json", "model.safetensors"]);
    assert_eq!(files(outside.path()), ["commit.json", "config.json", "model.safetensors"]);
    // A manifest of other files is none.
    fs::create_dir(&staging).unwrap();
    fs::write(staging.join("commit.json"), r#"{"files":["config.json"],"stale":["../x"]}"#).unwrap();
    refuse("a path in a manifest", dir.path(), Kind::Config, "stale");
}

/// Names of tensors and files that would steer a terminal are escaped in messages.
#[test]
fn names_in_messages() {
    let evil = "model.layers.0.mlp.experts.9.\u{1b}]0;owned\u{7}\u{202e}\r\n.weight";
    let mut tensors = raw(&fixture("qwen3_moe").join("model.safetensors"));
    tensors.insert(evil.to_string(), Raw::f32(&[1], [0.0]));
    let dir = folder(&config("qwen3_moe"), &tensors);
    let index = json!({"weight_map": {evil: "a.safetensors"}}).to_string();
    let missing = copy("qwen3_moe");
    fs::rename(missing.path().join("model.safetensors"), missing.path().join("a.safetensors")).unwrap();
    fs::write(missing.path().join("model.safetensors.index.json"), index).unwrap();
    let file = copy("qwen3_moe");
    fs::remove_file(file.path().join("model.safetensors")).unwrap();
    let index = json!({"weight_map": {"a": format!("{evil}{}", "x".repeat(500))}}).to_string();
    fs::write(file.path().join("model.safetensors.index.json"), index).unwrap();
    let opened = Checkpoint::open(dir.path()).unwrap();
    for error in [
        attempt(dir.path()).unwrap_err(),
        attempt(missing.path()).unwrap_err(),
        attempt(file.path()).unwrap_err(),
        opened.tensor(&format!("{evil}{}", "y".repeat(1 << 20)), None).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.len() < 2000 && !text.chars().any(|c| c.is_control() || c == '\u{202e}'), "{text:?}");
        assert!(text.contains(r"\u{1b}]0;owned\u{7}\u{202e}"), "{text}");
    }
    let error = opened.tensor("nope", None).unwrap_err().to_string();
    assert!(error.ends_with("tensor nope is missing; expected one of this name"), "{error}");
}

fn clip(value: &Value) -> String {
    value.to_string().chars().take(40).collect()
}

#[test]
fn tensors_of_a_block() {
    type Change = fn(&mut Tensors);
    fn name(last: &str) -> String {
        format!("model.layers.0.mlp.{last}")
    }
    fn edit(tensors: &mut Tensors, last: &str, change: impl FnOnce(&mut Raw)) {
        change(tensors.get_mut(&name(last)).unwrap());
    }
    const DOWN: &str = "experts.7.down_proj.weight";
    const V3: &str = "model.layers.1.mlp.experts.3.down_proj.weight";
    let cases: Vec<(&str, &str, Change, Kind, &str)> = vec![
        ("no router", "qwen3_moe", |t| drop(t.remove(&name("gate.weight"))), Kind::Missing, "mlp.gate.weight"),
        // Expert 0 belongs to the other rank: every rank refuses alike.
        ("no expert 0", "qwen3_moe", |t| t.retain(|n, _| !n.contains("0.mlp.experts.0.")), Kind::Missing, "experts.0."),
        ("no last expert", "qwen3_moe", |t| drop(t.remove(&name(DOWN))), Kind::Missing, "experts.7.down_proj"),
        (
            "one expert too many",
            "qwen3_moe",
            |t| drop(t.insert(name("experts.8.up_proj.weight"), Raw::f32(&[1], [0.0]))),
            Kind::Unexpected,
            "experts.8.up_proj",
        ),
        (
            "a bias",
            "qwen3_moe",
            |t| drop(t.insert(name("gate.bias"), Raw::f32(&[8], [0.0; 8]))),
            Kind::Unexpected,
            "gate.bias",
        ),
        (
            "both forms",
            "qwen3_moe",
            |t| drop(t.insert(name("experts.down_proj"), Raw::f32(&[8, 64, 32], vec![0.0; 8 * 64 * 32]))),
            Kind::Unexpected,
            "experts.down_proj",
        ),
        ("transposed", "qwen3_moe", |t| edit(t, DOWN, |r| r.shape.reverse()), Kind::Tensor, "[64, 32]"),
        ("flat", "qwen3_moe", |t| edit(t, DOWN, |r| r.shape = vec![64 * 32]), Kind::Tensor, "[2048]"),
        ("too small", "qwen3_moe", |t| edit(t, DOWN, |r| *r = Raw::f32(&[1, 1], [0.0])), Kind::Tensor, "[1, 1]"),
        (
            "an integer type",
            "qwen3_moe",
            |t| edit(t, DOWN, |r| *r = Raw::new("i64", &[64, 32], vec![0; 64 * 32 * 8])),
            Kind::Tensor,
            "I64",
        ),
        (
            "bytes without scales",
            "qwen3_moe",
            |t| edit(t, DOWN, |r| *r = Raw::new("u8", &[64, 32], vec![0; 64 * 32])),
            Kind::Tensor,
            "U8",
        ),
        (
            "another type than the rest",
            "qwen3_moe",
            |t| edit(t, DOWN, |r| *r = Raw::new("bf16", &[64, 32], vec![0; 64 * 32 * 2])),
            Kind::Tensor,
            "bf16",
        ),
        (
            "FP8 without scales",
            "qwen3_moe",
            |t| edit(t, DOWN, |r| *r = Raw::new("f8_e4m3", &[64, 32], vec![0; 64 * 32])),
            Kind::Missing,
            "weight_scale_inv",
        ),
        (
            "scales missing",
            "deepseek_v3_fp8",
            |t| drop(t.remove(&format!("{V3}_scale_inv"))),
            Kind::Missing,
            "scale_inv",
        ),
        (
            "scales of other blocks",
            "deepseek_v3_fp8",
            |t| drop(t.insert(format!("{V3}_scale_inv"), Raw::f32(&[2, 1], [1.0; 2]))),
            Kind::Tensor,
            "[2, 2]",
        ),
        (
            "scales of integers",
            "deepseek_v3_fp8",
            |t| drop(t.insert(format!("{V3}_scale_inv"), Raw::new("i64", &[2, 2], vec![0; 32]))),
            Kind::Tensor,
            "I64",
        ),
        (
            "codes of another type",
            "gpt_oss_mxfp4",
            |t| edit(t, "experts.down_proj_blocks", |r| (r.dtype, r.shape) = ("bf16".to_string(), vec![8, 64, 2, 8])),
            Kind::Tensor,
            "down_proj_blocks",
        ),
        (
            "blocks of 8 bytes",
            "gpt_oss_mxfp4",
            |t| edit(t, "experts.down_proj_blocks", |r| r.shape = vec![8, 64, 4, 8]),
            Kind::Tensor,
            "16",
        ),
        (
            "no MXFP4 scales",
            "gpt_oss_mxfp4",
            |t| drop(t.remove(&name("experts.down_proj_scales"))),
            Kind::Missing,
            "experts.down_proj_scales is missing",
        ),
        (
            "no bias",
            "gpt_oss_mxfp4",
            |t| drop(t.remove(&name("experts.down_proj_bias"))),
            Kind::Missing,
            "down_proj_bias",
        ),
        (
            "NVFP4 without its block scales",
            "qwen3_moe_nvfp4_modelopt",
            |t| drop(t.remove(&name("experts.7.down_proj.weight_scale"))),
            Kind::Missing,
            "weight_scale",
        ),
        (
            "NVFP4 without its factor",
            "qwen3_moe_nvfp4_modelopt",
            |t| drop(t.remove(&name("experts.7.down_proj.weight_scale_2"))),
            Kind::Missing,
            "experts.7.down_proj.weight_scale_2 is missing",
        ),
        (
            "NVFP4 scales of other blocks",
            "qwen3_moe_nvfp4_modelopt",
            |t| edit(t, "experts.7.down_proj.weight_scale", |r| r.shape = vec![32, 4]),
            Kind::Tensor,
            "one scale",
        ),
        (
            "a scaled input of another method",
            "qwen3_moe_nvfp4_modelopt",
            |t| drop(t.insert(name("experts.7.down_proj.pre_quant_scale"), Raw::f32(&[32], [1.0; 32]))),
            Kind::Unexpected,
            "pre_quant_scale",
        ),
    ];
    for (what, family, change, expected, words) in cases {
        let mut tensors = raw(&fixture(family).join("model.safetensors"));
        change(&mut tensors);
        let dir = folder(&config(family), &tensors);
        refuse(what, dir.path(), expected, words);
    }
}

/// Scales that no quantizer writes would make other weights without a word: those of blocks, in each form, and of matrices.
#[test]
fn scales_that_are_no_scales() {
    const MODELOPT: &str = "model.layers.0.mlp.experts.7.down_proj";
    const COMPRESSED: &str = "model.layers.0.mlp.experts.7.down_proj";
    const V3: &str = "model.layers.1.mlp.experts.3.down_proj.weight_scale_inv";
    const OSS: &str = "model.layers.0.mlp.experts.down_proj_scales";
    let f32s = [f32::NAN, f32::INFINITY, -1.0].map(|value| value.to_le_bytes().to_vec());
    let e4m3 = [0x7f, 0xff, 0xb8].map(|byte| vec![byte]);
    let cases: [(&str, String, &[Vec<u8>]); 6] = [
        ("qwen3_moe_nvfp4_modelopt", format!("{MODELOPT}.weight_scale_2"), &f32s),
        ("qwen3_moe_nvfp4_modelopt", format!("{MODELOPT}.weight_scale"), &e4m3),
        ("qwen3_moe_nvfp4_ct", format!("{COMPRESSED}.weight_global_scale"), &f32s),
        ("qwen3_moe_nvfp4_ct", format!("{COMPRESSED}.weight_scale"), &e4m3),
        ("deepseek_v3_fp8", V3.into(), &f32s),
        ("gpt_oss_mxfp4", OSS.into(), &[vec![0xff]]),
    ];
    for (family, name, values) in cases {
        for value in values {
            let mut tensors = raw(&fixture(family).join("model.safetensors"));
            let data = &mut tensors.get_mut(&name).unwrap_or_else(|| panic!("{family}: no {name}")).data;
            // The last rank's, which loads.
            let at = data.len() - value.len();
            data[at..].copy_from_slice(value);
            let dir = folder(&config(family), &tensors);
            let what = format!("{family}, {value:?}");
            refuse(&what, dir.path(), Kind::Tensor, &name);
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            let layer = checkpoint.moe_layers()[0];
            let error = checkpoint.load_quantized(layer, options(1, 2, None)).expect_err(&what);
            assert!(kind(&error) == Kind::Tensor && error.to_string().contains(&name), "{what}: {error}");
        }
    }
}

/// A file that shrinks after it was opened is an error at the read, with the file's name.
#[test]
fn a_file_that_shrinks() {
    for family in ["qwen3_moe", "gpt_oss_mxfp4", "llama4_top2"] {
        let dir = copy(family);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let file = fs::OpenOptions::new().write(true).open(dir.path().join("model.safetensors")).unwrap();
        file.set_len(file.metadata().unwrap().len() / 3).unwrap();
        let layer = *checkpoint.moe_layers().last().unwrap();
        let error = checkpoint.load_block(layer, options(0, 1, None)).unwrap_err();
        assert_eq!(kind(&error), Kind::Truncated, "{error}");
        assert!(error.to_string().contains("model.safetensors"), "{error}");
    }
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
