//! The examples as programs: what they print, how they end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

/// This build's features: an example of others is another program under the same name.
const FEATURES: [(&str, bool); 7] = [
    ("default", cfg!(feature = "default")),
    ("candle", cfg!(feature = "candle")),
    ("burn", cfg!(feature = "burn")),
    ("cuda", cfg!(feature = "cuda")),
    ("nccl", cfg!(feature = "nccl")),
    ("nccl-ep", cfg!(feature = "nccl-ep")),
    ("burn-cuda", cfg!(feature = "burn-cuda")),
];

/// Folder of the examples, built from these sources with this test's features and profile: `cargo test --test
/// examples` alone would run what an earlier build has left, maybe with other features.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let this = std::env::current_exe().unwrap();
    let profile = this.ancestors().nth(2).unwrap();
    let profile_name = match profile.file_name().and_then(|name| name.to_str()).unwrap() {
        "debug" => "dev",
        other => other,
    };
    let on: Vec<&str> = FEATURES.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(["build", "--quiet", "--examples", "--no-default-features"]);
    command.args(["--profile", profile_name, "--features", &on.join(",")]).stdin(Stdio::null());
    command.arg("--target-dir").arg(profile.parent().unwrap());
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    profile.join("examples")
});

/// A program of `examples/`.
fn example(name: &str) -> Command {
    let program = FOLDER.join(name).with_extension(std::env::consts::EXE_EXTENSION);
    assert!(program.exists(), "{}: not where `cargo build --examples` puts it", program.display());
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).env_remove("MOEBIUS_EP");
    command
}

#[test]
fn all_features_are_known() {
    let manifest = include_str!("../Cargo.toml");
    let (_, rest) = manifest.split_once("\n[features]\n").unwrap();
    let names = rest.lines().take_while(|line| !line.starts_with('[')).filter_map(|line| line.split_once(" = "));
    let names: Vec<&str> = names.map(|(name, _)| name).filter(|name| !name.starts_with('#')).collect();
    assert_eq!(names, FEATURES.map(|(name, _)| name));
}

fn run(name: &str, arguments: &[&str]) -> Output {
    example(name).args(arguments).output().unwrap()
}

/// Ends with this status, prints nothing but an error, and that has these words.
fn refused(name: &str, arguments: &[&str], status: i32, words: &[&str]) {
    let done = run(name, arguments);
    let (out, errors) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert_eq!(done.status.code(), Some(status), "{name} {arguments:?}: {out}{errors}");
    assert_eq!(out, "", "{name} {arguments:?} printed a report before its error");
    for word in words {
        assert!(errors.contains(word), "{name} {arguments:?}: {word:?} is not in {errors}");
    }
}

/// As `program | head` does once it has read enough, on both streams.
#[cfg(unix)]
#[test]
fn a_reader_that_is_gone_ends_a_program_quietly() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe_bf16");
    let out = tempfile::tempdir().unwrap();
    let path = out.path().to_str().unwrap();
    let (quantized, trained) = (["--force", golden, path], ["--out", path]);
    for (name, arguments, impossible) in [
        ("inspect", &["--tokens", "8"][..], &["--ranks", "3"][..]),
        ("dense_reference", &[], &["--ranks", "3"]),
        ("quantize_checkpoint", &quantized, &[golden, golden]),
        ("train_lm", &trained, &["--ranks", "3"]),
        ("one_token", &[], &["--no-such-option"]),
        ("one_error", &[], &["--no-such-option"]),
    ] {
        let closed = || {
            let (read, write) = std::io::pipe().unwrap();
            drop(read);
            write
        };
        let done = example(name).args(arguments).stdout(closed()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&done.stderr), "", "{name}");
        assert_eq!(done.status.code(), Some(128 + 13), "{name}: as of a program that SIGPIPE ends");
        let status = example(name).args(arguments).stdout(closed()).stderr(closed()).status().unwrap();
        assert_eq!(status.code(), Some(128 + 13), "{name}");
        let status = example(name).args(impossible).stdout(closed()).stderr(closed()).status().unwrap();
        assert_eq!(status.code(), Some(2), "{name}: its error is read by nobody either");
    }
}

#[test]
fn inspect_checks_before_it_prints() {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe/config.json");
    refused("inspect", &[config], 1, &["config.json", "folder", "found a file"]);
    refused("inspect", &["--ranks", "3"], 2, &["--ranks 3", "divisor"]);
    refused("inspect", &["--ranks", "0"], 2, &["--ranks"]);
    refused("inspect", &["--layer", "7"], 2, &["--layer 7", "Mixture-of-Experts block"]);
    refused("inspect", &["--layer", "99999999999999"], 2, &["--layer 99999999999999"]);
    refused("inspect", &["--no-such-option"], 2, &["--no-such-option"]);
    // Both spellings of a dispatcher are one.
    let [a, b] = ["all_gather", "all-gather"].map(|name| run("inspect", &["--tokens", "8", "--dispatcher", name]));
    assert!(a.status.success() && a.stdout == b.stdout, "{a:?} {b:?}");
}

#[test]
fn dense_reference_checks_before_it_prints() {
    refused("dense_reference", &["--ranks", "3"], 2, &["--ranks", "found 3"]);
    refused("dense_reference", &["--layer", "99"], 2, &["--layer 99", "Mixture-of-Experts block"]);
    refused("dense_reference", &["--checkpoint", "/no/such/folder"], 1, &["/no/such/folder", "--checkpoint"]);
    if !cfg!(feature = "burn") {
        refused("dense_reference", &["--framework", "burn"], 2, &["--framework burn", "--features burn"]);
    }
    refused("dense_reference", &["--framework", "jax"], 2, &["jax"]);
}

#[test]
fn quantize_checkpoint_checks_before_it_prints() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe_bf16");
    let out = tempfile::tempdir().unwrap();
    let path = out.path().to_str().unwrap();
    std::fs::write(out.path().join("notes"), "").unwrap();
    refused("quantize_checkpoint", &[golden, path], 2, &[path, "--force"]);
    refused("quantize_checkpoint", &[golden], 2, &["OUT"]);
    refused("quantize_checkpoint", &["/no/such/folder", path, "--force"], 1, &["/no/such/folder"]);
}

/// Neither its source, by whatever name, nor a folder that holds something is written over unasked.
#[test]
fn quantize_checkpoint_leaves_what_is_there() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_moe_bf16");
    let parent = tempfile::tempdir().unwrap();
    let (dir, out) = (parent.path().join("dir"), parent.path().join("out"));
    fs::create_dir(&dir).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), dir.join(name)).unwrap();
    }
    let quantize = |to: &Path, more: &[&str]| {
        let done = example("quantize_checkpoint").arg(&dir).arg(to).args(more).output().unwrap();
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let weights = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
    let before = weights(&dir);
    let mut names = vec![dir.clone(), dir.join("../dir")];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&dir, parent.path().join("link")).unwrap();
        names.push(parent.path().join("link"));
    }
    for name in names {
        let (status, error) = quantize(&name, &["--force"]);
        assert!(status == Some(1) && error.contains("is the checkpoint that is read"), "{status:?} {error}");
        assert_ne!(quantize(&name, &[]).0, Some(0));
        assert!(weights(&dir) == before);
    }
    assert_eq!(quantize(&out, &[]), (Some(0), String::new()));
    let made = weights(&out);
    let (status, error) = quantize(&out, &[]);
    assert!(status == Some(2) && error.contains("--force"), "{status:?} {error}");
    assert_eq!(quantize(&out, &["--force", "--max-shard-bytes", "50000"]).0, Some(0));
    assert!(!out.join("model.safetensors").exists() && out.join("model.safetensors.index.json").exists());
    assert_eq!(quantize(&out, &["--force"]).0, Some(0));
    assert!(weights(&out) == made);
}

/// The guide has what the program prints and draws.
#[test]
fn one_token_is_in_the_guide() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("picture.svg");
    let done = run("one_token", &[picture.to_str().unwrap()]);
    assert!(done.status.success(), "{done:?}");
    let guide = include_str!("../docs/layer.md");
    for line in String::from_utf8(done.stdout).unwrap().lines() {
        assert!(guide.lines().any(|l| l == line), "docs/layer.md lacks: {line}");
    }
    let drawn = fs::read_to_string(picture).unwrap();
    assert_eq!(drawn, include_str!("../docs/images/one-token.svg"), "docs/images/one-token.svg");
}

/// The guide has what each rank is told of an error of rank 3, in the order in which it is printed.
#[test]
fn one_error_is_in_the_guide() {
    let done = run("one_error", &[]);
    assert!(done.status.success(), "{done:?}");
    let mut guide = include_str!("../docs/errors.md").lines();
    for line in String::from_utf8(done.stdout).unwrap().lines() {
        assert!(guide.any(|l| l == line), "docs/errors.md lacks, or has elsewhere: {line}");
    }
    let prints = |line: &str| line.starts_with("  rank ");
    assert!(!guide.any(prints), "docs/errors.md has more than the program prints");
}

/// Losses of a run that was ended, and gone on with by another process, are the unbroken run's to the last bit.
#[test]
fn train_lm_goes_on_where_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (state, out) = (path("state"), path("plots"));
    let train = |losses: &str, more: &[&str]| {
        let sizes = ["--steps", "4", "--batch", "4", "--experts", "4", "--layer-dtype", "bf16", "--clip", "0.5"];
        let arguments = [&sizes[..], &["--out", &out, "--losses", losses], more].concat();
        run("train_lm", &arguments)
    };
    let losses = |name: &str, more: &[&str]| {
        let done = train(&path(name), more);
        assert!(done.status.success(), "{done:?}");
        fs::read_to_string(path(name)).unwrap()
    };
    let unbroken = losses("unbroken", &[]);
    assert_eq!(unbroken.lines().count(), 4);
    let first = losses("first", &["--until", "2", "--save", &state]);
    let second = losses("second", &["--resume", &state]);
    assert_eq!(format!("{first}{second}"), unbroken);
    // At another number of ranks gradients are summed in another order: where one is about 0, its step of at most 8e-4
    // (4e-3 of the fourth step of 20) may turn around, which moves the loss by far less than that times ten.
    let number = |line: &str| line.split(' ').nth(1).unwrap().parse::<f64>().unwrap();
    for (found, expected) in losses("alone", &["--resume", &state, "--ranks", "1"]).lines().zip(second.lines()) {
        assert!((number(found) - number(expected)).abs() < 0.01, "{found} and {expected}");
    }
    // Another run's, one that has ended, and none.
    let refused = |more: &[&str], words: &[&str], status| {
        let done = train(&path("none"), more);
        let errors = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(status), "{errors}");
        assert!(words.iter().all(|word| errors.contains(word)), "{errors}");
    };
    refused(&["--resume", &state, "--seed", "2"], &["another run", "seed", "expected 2, found 1"], 1);
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    refused(&["--resume", &state, "--text", text], &["another run", "text: expected"], 1);
    refused(&["--resume", &state, "--until", "2"], &["--until"], 2);
    refused(&["--resume", "/no/such/folder"], &["/no/such/folder"], 1);
}
