//! Headers, indices and folders.

use super::*;

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
        (
            "a pointer of Git LFS",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n".to_vec(),
            "git lfs pull",
        ),
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
