//! Saving: a folder changes as one, keeps what is not the checkpoint's, and is written by one saver at a time.

use std::fs;
use std::path::Path;

use moebius::checkpoint::{BlockParams, Checkpoint, Form, SaveOptions, gather_blocks};
use moebius::{CheckpointError, Error};
use serde_json::Value;

use crate::support::*;

fn shards_of(max_shard_bytes: u64) -> SaveOptions {
    let mut options = SaveOptions::default();
    options.max_shard_bytes = max_shard_bytes;
    options
}

/// A copy of a fixture, as anybody may have one.
fn copy_to(family: &str, dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::write(dir.join(name), fs::read(fixture(family).join(name)).unwrap()).unwrap();
    }
}

/// The forms that savers of these tests write in turn: in one file, quantized, in several files, quantized, in several
/// files by two ranks, quantized.
fn save_form(source: &Checkpoint, dir: &Path, turn: usize) -> moebius::Result<()> {
    match turn % 6 {
        0 => source.save(dir, &[]),
        2 => source.save_with(dir, &[], shards_of(60_000)),
        4 => on_ranks(2, |group| {
            let share = |layer: &usize| {
                let options = options(group.rank(), 2, None);
                Ok((*layer, source.load_block(*layer, options)?.params))
            };
            let own = source.moe_layers().iter().map(share).collect::<moebius::Result<Vec<_>>>()?;
            let own: Vec<_> = own.iter().map(|(layer, block)| block.at_layer(*layer)).collect();
            source.save_over_ranks(dir, &own, group, shards_of(60_000))
        })
        .into_iter()
        .collect(),
        _ => source.save_nvfp4(dir).map(drop),
    }
}

/// A configuration alone has nothing to save.
#[test]
fn a_checkpoint_of_no_tensors_is_not_written() {
    let (dir, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::copy(fixture("qwen3_moe").join("config.json"), dir.path().join("config.json")).unwrap();
    let checkpoint = Checkpoint::open_config(dir.path()).unwrap();
    let options = SaveOptions::default().with_max_shard_bytes(1000).with_replace_source(true);
    for error in [checkpoint.save(target.path(), &[]), checkpoint.save_with(dir.path(), &[], options)] {
        match error {
            Err(Error::Invalid { name, .. }) => assert_eq!(name, "tensors"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0);
}

/// Whether a folder holds one form, as configuration, names of files and tensors say, and which: quantized or not.
fn one_form(dir: &Path, expected: &[BlockParams; 2]) -> bool {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let quantized = checkpoint.config().get("quantization_config").is_some();
    let form = checkpoint.block_form(0).unwrap();
    assert_eq!(form == Form::Nvfp4ModelOpt, quantized, "config.json says otherwise than the tensors");
    let block = checkpoint.load_block(0, options(0, 1, None)).unwrap();
    assert_same(&block.params, &expected[usize::from(quantized)], "a killed save");
    quantized
}

/// The blocks of both forms.
fn both_forms(source: &Checkpoint) -> [BlockParams; 2] {
    [0, 1].map(|turn| {
        let dir = tempfile::tempdir().unwrap();
        save_form(source, dir.path(), turn).unwrap();
        Checkpoint::open(dir.path()).unwrap().load_block(0, options(0, 1, None)).unwrap().params
    })
}

/// A process that saves one form after another is killed 500 times: each time the folder is wholly one form, for this
/// crate and for a program that opens the files by their names. Every other kill hits a save into a folder with a
/// subfolder, which no snapshot can show: there the other program may find no configuration, but never parts of both
/// forms.
#[cfg(unix)]
#[test]
fn killed_saves_leave_one_form_whole() {
    use std::io::{BufRead, Write};
    use std::process::{Command, Stdio};
    use std::time::Duration;

    const DIR: &str = "MOEBIUS_KILLED_SAVES";
    const KILLS: usize = 500;
    let source = Checkpoint::open(fixture("qwen3_moe_bf16")).unwrap();
    if let Some(dir) = std::env::var_os(DIR) {
        let [turn, pause]: [usize; 2] =
            ["TURN", "PAUSE"].map(|name| std::env::var(format!("MOEBIUS_KILLED_{name}")).unwrap().parse().unwrap());
        println!("\nready");
        for saves in 0.. {
            if saves == pause {
                std::io::stdin().read_line(&mut String::new()).unwrap();
            }
            save_form(&source, Path::new(&dir), turn + saves).unwrap();
            println!("saved");
        }
    }
    let expected = both_forms(&source);
    let parents = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let dirs = parents.each_ref().map(|parent| parent.path().join("model"));
    for dir in &dirs {
        save_form(&source, dir, 0).unwrap();
        fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    }
    fs::create_dir(dirs[1].join("runs")).unwrap();
    fs::write(dirs[1].join("runs/log"), "log").unwrap();
    let mut next = random(20);
    let mut seen = [[0; 2]; 2];
    for kill in 0..KILLS {
        let (dir, subfolder) = (&dirs[kill % 2], kill % 2 == 1);
        // At least so many saves are complete. Every fourth kill hits the beginning of the one after them, whatever the
        // machine's speed: the saver waits before it. The others hit any later moment.
        let (saves, waits) = (next() % 3, kill % 8 < 2);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "saving::killed_saves_leave_one_form_whole", "--nocapture"])
            .env(DIR, dir)
            .env("MOEBIUS_KILLED_TURN", (next() % 6).to_string())
            .env("MOEBIUS_KILLED_PAUSE", if waits { saves } else { u32::MAX.into() }.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        lines.find(|line| line.as_ref().unwrap() == "ready").unwrap().unwrap();
        for _ in 0..saves {
            assert_eq!(lines.next().unwrap().unwrap(), "saved", "kill {kill}");
        }
        // Not a measurement: whichever moment this hits, the same must hold.
        let moment = if waits {
            child.stdin.take().unwrap().write_all(b"\n").unwrap();
            next() % 300
        } else {
            next() % 15_000
        };
        std::thread::sleep(Duration::from_micros(moment));
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success(), "kill {kill}: the saver failed of itself");
        let quantized = one_form(dir, &expected);
        seen[usize::from(subfolder)][usize::from(quantized)] += 1;
        // What another program finds.
        let stands_in = cfg!(target_os = "linux") && !subfolder;
        match fs::read(dir.join("config.json")) {
            Ok(config) => {
                let config: Value = serde_json::from_slice(&config).unwrap();
                assert_eq!(config.get("quantization_config").is_some(), dir.join("hf_quant_config.json").exists());
            }
            Err(error) => assert!(!stands_in && error.kind() == std::io::ErrorKind::NotFound, "kill {kill}: {error}"),
        }
        // A snapshot would be without it.
        assert!(!subfolder || fs::read_to_string(dir.join("runs/log")).is_ok(), "kill {kill}: another folder's name");
        assert_eq!(fs::read_to_string(dir.join("tokenizer.json")).unwrap(), "{}");
    }
    // Of the 62 kills at a save's beginning into each folder, half follow a quantized save.
    assert!(seen.as_flattened().iter().all(|count| *count > 5), "{seen:?}");
    for (dir, parent) in dirs.iter().zip(&parents) {
        save_form(&source, dir, 1).unwrap();
        assert!(one_form(dir, &expected));
        let mut found = files(dir);
        found.retain(|name| name != "runs");
        assert_eq!(found, ["config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json"]);
        assert_eq!(files(parent.path()), ["model"], "what killed saves left is gone");
    }
}

/// Whoever opens the folder while it is saved to finds one form whole, never an error; with a subfolder in it too.
#[test]
fn readers_meet_one_form() {
    let source = Checkpoint::open(fixture("qwen3_moe_bf16")).unwrap();
    let expected = both_forms(&source);
    for subfolder in [false, true] {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("model");
        save_form(&source, &dir, 0).unwrap();
        if subfolder {
            fs::create_dir(dir.join("runs")).unwrap();
        }
        let done = std::sync::atomic::AtomicBool::new(false);
        let opened = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut opened = 0;
                while !done.load(std::sync::atomic::Ordering::Relaxed) || opened == 0 {
                    one_form(&dir, &expected);
                    opened += 1;
                }
                opened
            });
            let saved = (1..40).try_for_each(|turn| save_form(&source, &dir, turn));
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            saved.unwrap();
            reader.join().unwrap()
        });
        assert!(opened > 0);
    }
}

/// Files of an older form go; those that are not the checkpoint's stay, and the folder stays the one that it was.
#[test]
fn stale_files_go_and_others_stay() {
    let source = Checkpoint::open(fixture("qwen3_moe_bf16")).unwrap();
    for subfolder in [false, true] {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("model");
        save_form(&source, &dir, 2).unwrap();
        let shards = files(&dir).iter().filter(|name| name.starts_with("model-0")).count();
        assert!(shards > 3 && dir.join("model.safetensors.index.json").exists());
        let mut others = vec!["README.md", "model-00001-of-00099.safetensors", "other.safetensors", "tokenizer.json"];
        for name in &others {
            fs::write(dir.join(name), *name).unwrap();
        }
        if subfolder {
            fs::create_dir(dir.join("runs")).unwrap();
            fs::write(dir.join("runs/log"), "log").unwrap();
            others.push("runs");
        }
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::os::unix::fs::symlink("../elsewhere", dir.join("link")).unwrap();
            others.push("link");
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o2750)).unwrap();
        }
        let before = fs::metadata(&dir).unwrap();
        for (turn, own) in [
            (1, vec!["config.json", "hf_quant_config.json", "model.safetensors"]),
            (0, vec!["config.json", "model.safetensors"]),
        ] {
            save_form(&source, &dir, turn).unwrap();
            let mut expected: Vec<&str> = own.into_iter().chain(others.iter().copied()).collect();
            expected.sort_unstable();
            assert_eq!(files(&dir), expected);
            for name in others.iter().filter(|name| !["runs", "link"].contains(name)) {
                assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), *name);
            }
        }
        assert_eq!(files(parent.path()), ["model"]);
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let after = fs::metadata(&dir).unwrap();
            assert_eq!((before.ino(), before.mode(), before.uid()), (after.ino(), after.mode(), after.uid()));
            assert_eq!(fs::read_link(dir.join("link")).unwrap(), Path::new("../elsewhere"));
        }
    }
}

/// A target that is a link to a folder stays a link, and the folder gets the checkpoint.
#[cfg(unix)]
#[test]
fn a_link_to_a_folder() {
    let source = Checkpoint::open(fixture("qwen3_moe")).unwrap();
    let parent = tempfile::tempdir().unwrap();
    fs::create_dir(parent.path().join("real")).unwrap();
    let link = parent.path().join("link");
    std::os::unix::fs::symlink("real", &link).unwrap();
    source.save(&link, &[]).unwrap();
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("real"));
    assert_eq!(files(&parent.path().join("real")), ["config.json", "model.safetensors"]);
    assert_eq!(files(parent.path()), ["link", "real"]);
}

/// One saver at a time; the other gets an error at once.
#[cfg(unix)]
#[test]
fn a_second_saver_is_refused() {
    let source = Checkpoint::open(fixture("qwen3_moe")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    source.save(dir.path(), &[]).unwrap();
    let before = fs::read(dir.path().join("model.safetensors")).unwrap();
    let first = fs::File::open(dir.path()).unwrap();
    first.lock().unwrap();
    for error in [source.save(dir.path(), &[]).unwrap_err(), source.save_nvfp4(dir.path()).unwrap_err()] {
        assert!(matches!(error, Error::Checkpoint(CheckpointError::Busy { .. })), "{error}");
    }
    assert!(fs::read(dir.path().join("model.safetensors")).unwrap() == before);
    drop(first);
    source.save_nvfp4(dir.path()).unwrap();
}

/// No save replaces what it reads without being told to, and none in NVFP4 at all, by whatever name.
#[test]
fn a_source_is_not_replaced() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("model");
    copy_to("qwen3_moe", &dir);
    let source = Checkpoint::open(&dir).unwrap();
    let before = fs::read(dir.join("model.safetensors")).unwrap();
    let mut names = vec![dir.clone(), parent.path().join("model/../model")];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&dir, parent.path().join("link")).unwrap();
        names.push(parent.path().join("link"));
    }
    let mut replace = SaveOptions::default();
    replace.replace_source = true;
    for name in &names {
        for (error, allowed) in [
            (source.save(name, &[]).unwrap_err(), true),
            (source.save_nvfp4(name).unwrap_err(), false),
            (source.save_nvfp4_with(name, replace).unwrap_err(), false),
        ] {
            assert!(matches!(error, Error::Checkpoint(CheckpointError::OwnSource { .. })), "{error}");
            assert_eq!(error.to_string().contains("SaveOptions::replace_source"), allowed, "{error}");
        }
        assert!(fs::read(dir.join("model.safetensors")).unwrap() == before);
    }
    // A folder of links: what they lead to is the source too.
    #[cfg(unix)]
    {
        let cache = parent.path().join("cache");
        fs::create_dir(&cache).unwrap();
        for name in files(&dir) {
            std::os::unix::fs::symlink(dir.join(&name), cache.join(&name)).unwrap();
        }
        let mut follow = moebius::checkpoint::OpenOptions::default();
        follow.follow_links = true;
        let linked = Checkpoint::open_with(&cache, follow).unwrap();
        let error = linked.save(&dir, &[]).unwrap_err();
        assert!(matches!(error, Error::Checkpoint(CheckpointError::OwnSource { .. })), "{error}");
    }
    source.save_with(&dir, &[], replace).unwrap();
    assert!(raw(&dir.join("model.safetensors")) == raw(&fixture("qwen3_moe").join("model.safetensors")));
}

/// A limit on the size of files makes shards and an index, as Hugging Face's tools do.
#[test]
fn large_checkpoints_are_sharded() {
    let source = Checkpoint::open(fixture("qwen3_moe")).unwrap();
    let whole = raw(&fixture("qwen3_moe").join("model.safetensors"));
    let total: usize = whole.values().map(|tensor| tensor.data.len()).sum();
    for limit in [100_000, 5000, 1] {
        let dir = tempfile::tempdir().unwrap();
        source.save_with(dir.path(), &[], shards_of(limit)).unwrap();
        let index: Value =
            serde_json::from_slice(&fs::read(dir.path().join("model.safetensors.index.json")).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], total);
        let shards: Vec<String> = files(dir.path()).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
        assert!(shards.len() > 1 && shards[0] == format!("model-00001-of-{:05}.safetensors", shards.len()));
        let mut found = Tensors::new();
        for shard in &shards {
            let tensors = raw(&dir.path().join(shard));
            let bytes: usize = tensors.values().map(|tensor| tensor.data.len()).sum();
            assert!(bytes as u64 <= limit || tensors.len() == 1, "{shard}: {bytes} bytes");
            assert!(tensors.keys().all(|name| index["weight_map"][name] == shard.as_str()));
            found.extend(tensors);
        }
        assert!(found == whole);
        let saved = Checkpoint::open(dir.path()).unwrap();
        for &layer in source.moe_layers() {
            let load = |c: &Checkpoint| c.load_block(layer, options(0, 1, None)).unwrap().params;
            assert_same(&load(&source), &load(&saved), &format!("shards of {limit} bytes"));
        }
    }
}

/// Runs a body on each rank of a group of threads.
fn on_ranks<T: Send>(ranks: usize, body: impl Fn(&mut moebius::ep::Group<moebius::cpu::Cpu>) -> T + Sync) -> Vec<T> {
    use moebius::cpu::ThreadWorld;
    use moebius::ep::{Group, GroupConfig};
    let minute = std::time::Duration::from_secs(60);
    std::thread::scope(|scope| {
        let spawn = |comm| {
            scope.spawn(|| {
                let cpu = moebius::cpu::Cpu::new();
                body(&mut Group::new(cpu, Box::new(comm), GroupConfig::new(8, 4)).unwrap())
            })
        };
        let threads: Vec<_> = ThreadWorld::create(ranks, minute).into_iter().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Experts that lie on four ranks are saved by one of them, to the bytes that a save of the gathered blocks has: an
/// expert a tensor, all of them in one, and stacked.
#[test]
fn ranks_stream_their_experts_to_the_writer() {
    for family in ["qwen3_moe", "deepseek_v3_fp8", "gpt_oss", "dbrx", "qwen2_moe"] {
        let source = Checkpoint::open(fixture(family)).unwrap();
        let layers = source.moe_layers().to_vec();
        let share = |layer, rank, ranks| source.load_block(layer, options(rank, ranks, None)).unwrap().params;
        let blocks: Vec<_> = layers
            .iter()
            .map(|layer| (*layer, gather_blocks((0..4).map(|rank| share(*layer, rank, 4)).collect()).unwrap()))
            .collect();
        let borrowed: Vec<_> = blocks.iter().map(|(layer, block)| block.at_layer(*layer)).collect();
        for limit in [u64::MAX, 50_000] {
            let (expected, found) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            source.save_with(expected.path(), &borrowed, shards_of(limit)).unwrap();
            on_ranks(4, |group| {
                let own: Vec<_> = layers.iter().map(|layer| (*layer, share(*layer, group.rank(), 4))).collect();
                let own: Vec<_> = own.iter().map(|(layer, block)| block.at_layer(*layer)).collect();
                source.save_over_ranks(found.path(), &own, group, shards_of(limit)).unwrap();
            });
            assert_eq!(files(expected.path()), files(found.path()), "{family}");
            for name in files(expected.path()) {
                let read = |dir: &Path| fs::read(dir.join(&name)).unwrap();
                assert!(read(expected.path()) == read(found.path()), "{family}: {name}");
            }
        }
    }
}

/// An error of one rank is one of all, and the group goes on.
#[test]
fn an_error_of_one_rank_is_told_to_all() {
    let source = Checkpoint::open(fixture("qwen3_moe")).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    fs::write(&file, "no folder").unwrap();
    let results = on_ranks(2, |group| {
        let own = |layer| (layer, source.load_block(layer, options(group.rank(), 2, None)).unwrap().params);
        let (one, two) = (own(0), own(1));
        let pair = [one.1.at_layer(one.0), two.1.at_layer(two.0)];
        let mut errors = Vec::new();
        // The first rank cannot write; the second has another layer, then a layer twice.
        errors.push(source.save_over_ranks(&file, &pair, group, SaveOptions::default()).unwrap_err());
        let dir = parent.path().join("model");
        let other = if group.rank() == 0 { &pair[..] } else { &pair[..1] };
        errors.push(source.save_over_ranks(&dir, other, group, SaveOptions::default()).unwrap_err());
        let twice = if group.rank() == 0 { pair } else { [pair[0], pair[0]] };
        errors.push(source.save_over_ranks(&dir, &twice, group, SaveOptions::default()).unwrap_err());
        assert!(!dir.exists());
        source.save_over_ranks(parent.path().join("last"), &pair, group, SaveOptions::default()).unwrap();
        errors.into_iter().map(|error| error.to_string()).collect::<Vec<_>>()
    });
    assert!(results[0][0].contains("file") && results[1][0].contains("file"), "{results:?}");
    assert!(results.iter().all(|errors| errors[1].contains("the same layers")), "{results:?}");
    assert!(results[1][2].contains("twice") && results[0][2].contains("twice"), "{results:?}");
    assert_eq!(files(parent.path()), ["file", "last"]);
}

/// A save that cannot be written leaves what was there, and no folder that was not.
#[test]
fn a_failed_save_leaves_nothing() {
    let source = Checkpoint::open(fixture("qwen3_moe")).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("model");
    // A shard that shrinks under the reader.
    let copy = parent.path().join("copy");
    copy_to("qwen3_moe", &copy);
    let damaged = Checkpoint::open(&copy).unwrap();
    fs::OpenOptions::new().write(true).open(copy.join("model.safetensors")).unwrap().set_len(9000).unwrap();
    assert!(damaged.save(parent.path().join("new/folder"), &[]).is_err());
    source.save(&dir, &[]).unwrap();
    let before = fs::read(dir.join("model.safetensors")).unwrap();
    assert!(damaged.save(&dir, &[]).is_err());
    assert!(fs::read(dir.join("model.safetensors")).unwrap() == before);
    assert_eq!(files(&dir), ["config.json", "model.safetensors"]);
    assert_eq!(files(parent.path()), ["copy", "model"]);
}
