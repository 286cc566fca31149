//! The build script's cache of compiled kernels (`build/cubin_cache.rs`): nothing is built here.

#[path = "../build/cubin_cache.rs"]
mod cubin_cache;

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Duration;

use cubin_cache::{Cache, Inputs, KEPT_ENTRIES, Key, Output, STALE};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// A folder of sources, one of outputs and one of a cache.
struct Place {
    root: tempfile::TempDir,
}

impl Place {
    fn new() -> std::io::Result<Self> {
        let place = Self { root: tempfile::tempdir()? };
        std::fs::create_dir_all(place.path("kernels/common"))?;
        std::fs::create_dir(place.path("out"))?;
        place.write("kernels/stage.cu", "#include \"common/one.cuh\"\n#include <cuda_bf16.h>\nint stage;\n")?;
        place.write("kernels/common/one.cuh", "#pragma once\n  # include \"two.cuh\"  // beside it\n")?;
        place.write("kernels/common/two.cuh", "#include <common/one.cuh>\nint two;\n")?;
        place.write("kernels/other.cu", "int other;\n")?;
        Ok(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> std::io::Result<()> {
        std::fs::write(self.path(name), text)
    }

    /// Result of `use_them` for the stage's inputs.
    fn with_inputs<T>(&self, flags: &[&str], compiler: &str, use_them: impl FnOnce(Inputs<'_>) -> T) -> T {
        let flags: Vec<String> = flags.iter().map(|f| f.to_string()).collect();
        let (source, folder) = (self.path("kernels/stage.cu"), self.path("kernels"));
        use_them(Inputs { source: &source, folder: &folder, flags: &flags, compiler })
    }

    fn key(&self, flags: &[&str], compiler: &str) -> Result<Key, String> {
        self.with_inputs(flags, compiler, |inputs| inputs.key())
    }

    fn cache(&self) -> Cache {
        Cache::new(self.path("cache"))
    }

    /// Fetches the cubin of a flag into `out/name.*`, compiling to `text` if need be: what the cubin and the log are
    /// then, and whether it was compiled.
    fn fetch(&self, flag: &str, name: &str, text: &str) -> Result<(String, String, bool), Box<dyn std::error::Error>> {
        let (cubin, log) = (self.path(&format!("out/{name}.cubin")), self.path(&format!("out/{name}.log")));
        let compile = || {
            let log_too = std::fs::write(&cubin, text).and_then(|()| std::fs::write(&log, format!("log of {text}")));
            log_too.map_err(|e| e.to_string())
        };
        let output = Output { image: &cubin, log: &log };
        let compiled = self.with_inputs(&[flag], "nvcc", |inputs| self.cache().fetch(&inputs, output, compile))?;
        Ok((std::fs::read_to_string(&cubin)?, std::fs::read_to_string(&log)?, compiled))
    }

    fn entries(&self) -> usize {
        std::fs::read_dir(self.path("cache")).map_or(0, |list| list.count())
    }
}

fn made(text: &str, compiled: bool) -> (String, String, bool) {
    (text.to_string(), format!("log of {text}"), compiled)
}

#[test]
fn an_entry_depends_on_all_that_a_cubin_is_made_from() -> Outcome {
    let place = Place::new()?;
    let key = || place.key(&["-O3", "-Ia"], "nvcc 13");
    let first = key()?;
    assert_eq!(first, key()?);
    assert_ne!(first, place.key(&["-O2", "-Ia"], "nvcc 13")?);
    assert_ne!(first, place.key(&["-O3-Ia"], "nvcc 13")?, "flags are told apart");
    assert_ne!(first, place.key(&["-O3", "-Ia"], "nvcc 12")?);
    place.write("kernels/other.cu", "int changed;\n")?;
    place.write("kernels/common/unused.cuh", "int unused;\n")?;
    assert_eq!(first, key()?, "what is not included does not count");
    // By way of one.cuh.
    place.write("kernels/common/two.cuh", "int changed;\n")?;
    let second = key()?;
    assert_ne!(first, second);
    place.write("kernels/stage.cu", "#include \"common/one.cuh\"\nint changed;\n")?;
    assert_ne!(second, key()?);
    place.write("kernels/stage.cu", "#include NAME\n")?;
    let error = key().err().unwrap_or_default();
    assert!(error.contains("stage.cu") && error.contains("#include NAME"), "{error}");
    Ok(())
}

#[test]
fn a_second_build_takes_what_the_first_has_compiled() -> Outcome {
    let place = Place::new()?;
    assert_eq!(place.fetch("-O3", "first", "a")?, made("a", true));
    assert_eq!(place.fetch("-O3", "second", "b")?, made("a", false));
    assert_eq!(place.fetch("-g", "third", "c")?, made("c", true));
    assert_eq!(place.entries(), 2, "nothing unfinished stays");
    Ok(())
}

#[test]
fn a_failed_compilation_is_not_kept() -> Outcome {
    let place = Place::new()?;
    let (cubin, log) = (place.path("out/x.cubin"), place.path("out/x.log"));
    let fail = || {
        std::fs::write(&cubin, "half").map_err(|e| e.to_string())?;
        Err("ptxas was killed".to_string())
    };
    let output = Output { image: &cubin, log: &log };
    let failed = place.with_inputs(&["-O3"], "nvcc", |inputs| place.cache().fetch(&inputs, output, fail));
    assert_eq!(failed, Err("ptxas was killed".to_string()));
    assert_eq!(place.entries(), 0);
    assert_eq!(place.fetch("-O3", "x", "whole")?, made("whole", true));
    Ok(())
}

#[test]
fn a_source_edited_meanwhile_leaves_no_entry() -> Outcome {
    let place = Place::new()?;
    let (cubin, log) = (place.path("out/x.cubin"), place.path("out/x.log"));
    let edit = || {
        let files = [(&cubin, "of which text?"), (&log, ""), (&place.path("kernels/common/two.cuh"), "int edited;\n")];
        files.into_iter().try_for_each(|(file, text)| std::fs::write(file, text)).map_err(|e| e.to_string())
    };
    let output = Output { image: &cubin, log: &log };
    assert_eq!(place.with_inputs(&["-O3"], "nvcc", |inputs| place.cache().fetch(&inputs, output, edit)), Ok(true));
    assert_eq!(place.entries(), 0);
    Ok(())
}

#[test]
fn a_damaged_entry_is_compiled_again() -> Outcome {
    for damaged in ["cubin", "sha256", "log"] {
        let place = Place::new()?;
        place.fetch("-O3", "first", "whole")?;
        let entry = std::fs::read_dir(place.path("cache"))?.next().ok_or("no entry")??.path();
        match damaged {
            "log" => std::fs::remove_file(entry.join(damaged))?,
            _ => std::fs::write(entry.join(damaged), "who")?,
        }
        assert_eq!(place.fetch("-O3", "second", "again")?, made("again", true), "{damaged}");
        assert_eq!(place.fetch("-O3", "third", "never")?, made("again", false), "{damaged}");
    }
    Ok(())
}

#[test]
fn a_cache_that_cannot_be_written_is_no_error() -> Outcome {
    let place = Place::new()?;
    // A file where the folder would be.
    place.write("cache", "")?;
    assert_eq!(place.fetch("-O3", "first", "a")?, made("a", true));
    assert_eq!(place.fetch("-O3", "second", "b")?, made("b", true));
    place.cache().prune(0, Duration::ZERO);
    assert_eq!(std::fs::read_to_string(place.path("cache"))?, "");
    Ok(())
}

#[test]
fn builds_at_the_same_time_agree() -> Outcome {
    const BUILDS: usize = 8;
    let place = Place::new()?;
    let start = Barrier::new(BUILDS);
    let build = |i: usize| {
        start.wait();
        place.fetch("-O3", &format!("of{i}"), "same").map(|(cubin, ..)| cubin).map_err(|e| e.to_string())
    };
    let cubins = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..BUILDS).map(|i| scope.spawn(move || build(i))).collect();
        threads.into_iter().map(|t| t.join().map_err(|_| "panicked".to_string())?).collect::<Result<Vec<_>, _>>()
    })?;
    assert!(cubins.iter().all(|cubin| cubin == "same"), "{cubins:?}");
    assert_eq!(place.entries(), 1);
    Ok(())
}

#[test]
fn what_was_used_last_is_kept() -> Outcome {
    let place = Place::new()?;
    let flags = ["0", "1", "2", "3", "4", "5"];
    for (i, flag) in flags.into_iter().enumerate() {
        place.fetch(flag, "x", flag)?;
        // An entry's age is the time of its last use.
        let name = place.key(&[flag], "nvcc")?;
        let sum = std::fs::File::options().append(true).open(place.path("cache").join(name.as_str()).join("sha256"))?;
        sum.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(i as u64))?;
    }
    // The oldest is used again, and so the youngest.
    assert_eq!(place.fetch(flags[0], "x", "never")?, made("0", false));
    std::fs::create_dir(place.path("cache/unfinished-1-0"))?;
    std::fs::create_dir(place.path("cache/of another kind"))?;
    place.cache().prune(KEPT_ENTRIES, STALE);
    assert_eq!(place.entries(), 8, "nothing is too many or too old");
    place.cache().prune(2, Duration::ZERO);
    assert_eq!(place.entries(), 3, "two, and what is no entry");
    for (i, kept) in [true, false, false, false, false, true].into_iter().enumerate() {
        assert_eq!(place.fetch(flags[i], "x", "new")?.2, !kept, "entry {i}");
    }
    Ok(())
}

#[test]
fn it_lies_under_cargos_target_directory() -> Outcome {
    let root = tempfile::tempdir()?;
    let target = root.path().join("target");
    // As cargo lays it out, with a target triple and without.
    for below in ["release/build/moebius-0123/out", "x86_64-unknown-linux-gnu/debug/build/moebius-0123/out"] {
        let out = target.join(below);
        std::fs::create_dir_all(&out)?;
        assert_eq!(Cache::locate(None, &out).folder(), out.join("moebius-cubins"), "no tag: not shared");
        std::fs::write(target.join("CACHEDIR.TAG"), "")?;
        assert_eq!(Cache::locate(None, &out).folder(), target.join("moebius-cubins"));
        assert_eq!(Cache::locate(Some("elsewhere".into()), &out).folder(), Path::new("elsewhere"));
        std::fs::remove_file(target.join("CACHEDIR.TAG"))?;
    }
    Ok(())
}
