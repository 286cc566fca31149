//! Compiles a crate's `kernels/*.cu`: for the layer's build script, and for the decoders' (`models/build.rs`).
//!
//! nvcc: `NVCC` (a path), else `CUDA_HOME/bin`, `CUDA_PATH/bin`, `PATH`, `/usr/local/cuda/bin`; 12.0 or later.
//! Architectures of cubins: `MOEBIUS_CUDA_ARCHS`, else `CUDA_COMPUTE_CAP`: a list of compute capabilities such as
//! `80,90a` or `8.0 100f`, or `native`; else the GPU of this machine; else 80 and 90a. `90` means `90a`, as Hopper's own
//! instructions need the suffix. The first variable is for builds with candle, whose own kernels read the second and
//! take a single capability there.
//!
//! Each stage becomes one cubin an architecture, or one text of PTX, embedded in the library and loaded through the
//! driver. They are kept for other builds (`build/cubin_cache.rs`), in `MOEBIUS_CUBIN_CACHE` or else in `moebius-cubins`
//! under cargo's target directory. With the variable, builds with several target directories or checkouts share them;
//! line information names the files of the build that compiled.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::cubin_cache::{Cache, Inputs, KEPT_ENTRIES, Output, STALE};

const OLDEST_NVCC: (u32, u32) = (12, 0);
const DEFAULT_ARCHITECTURES: [&str; 2] = ["80", "90a"];
const ARCHITECTURE_VARIABLES: [&str; 2] = ["MOEBIUS_CUDA_ARCHS", "CUDA_COMPUTE_CAP"];
const NVCC_VARIABLES: [&str; 3] = ["NVCC", "CUDA_HOME", "CUDA_PATH"];
/// Variables that nvcc itself reads, beside its arguments.
const FLAG_VARIABLES: [&str; 3] = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"];
const CACHE_VARIABLE: &str = "MOEBIUS_CUBIN_CACHE";
/// The sources' folder.
const FOLDER: &str = "kernels";

/// The form that a crate has its kernels compiled to.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// A cubin for each architecture that is asked for: `CUBINS` and `RELEASE` in `OUT_DIR/cubins.rs`.
    #[allow(dead_code, reason = "one of the build scripts that include this file makes them")]
    Cubins,
    /// PTX for compute capabilities, such as `80`, which the driver compiles for its GPU, of one of these or a later:
    /// `PTX` in `OUT_DIR/ptx.rs`.
    #[allow(dead_code, reason = "as above")]
    Ptx(&'static [&'static str]),
}

impl Target {
    /// The file that lists what was compiled, and the ending of each.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Cubins => ("cubins.rs", "cubin"),
            Self::Ptx(_) => ("ptx.rs", "ptx"),
        }
    }
}

/// An nvcc that is new enough.
struct Compiler {
    nvcc: PathBuf,
    /// `13.0`.
    release: String,
    /// All that it says of itself, and what the environment adds to its arguments.
    identity: String,
}

/// Compiles all stages, with nvcc's `flags` beside architecture, format and files, or takes them from the cache; and
/// lists them in `OUT_DIR`.
pub fn build(target: Target, flags: &[&str]) -> Result<(), String> {
    println!("cargo:rerun-if-changed={FOLDER}");
    let variables =
        ARCHITECTURE_VARIABLES.iter().chain(&NVCC_VARIABLES).chain(&FLAG_VARIABLES).chain([&CACHE_VARIABLE]);
    variables.for_each(|v| println!("cargo:rerun-if-env-changed={v}"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set (run by cargo)")?);
    let (mut jobs, mut release) = (Vec::new(), String::new());
    // Documentation is built without a toolkit.
    if std::env::var_os("DOCS_RS").is_none() {
        let compiler = compiler(find_nvcc()?)?;
        release.clone_from(&compiler.release);
        jobs = self::jobs(target, flags, &compiler, &out)?;
        let given = std::env::var_os(CACHE_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
        compile(&compiler, &Cache::locate(given, &out), &jobs)?;
    }
    let (name, _) = target.names();
    let file = out.join(name);
    std::fs::write(&file, table(target, &jobs, &release)?).map_err(|e| format!("{}: {e}", file.display()))
}

/// One run of nvcc.
struct Job {
    stage: String,
    source: PathBuf,
    arch: String,
    flags: Vec<String>,
    image: PathBuf,
}

/// A run for each stage and architecture.
fn jobs(target: Target, flags: &[&str], compiler: &Compiler, out: &Path) -> Result<Vec<Job>, String> {
    let architectures = match target {
        Target::Cubins => architectures(&compiler.nvcc)?,
        Target::Ptx(of) => of.iter().map(|arch| arch.to_string()).collect(),
    };
    let (_, ending) = target.names();
    let mut jobs = Vec::new();
    for (stage, source) in stages()? {
        for arch in &architectures {
            let format = match target {
                // `-gencode` and not `-arch`: the shorthand adds a pass without the suffix, which Hopper's instructions
                // fail in.
                Target::Cubins => [format!("-gencode=arch=compute_{arch},code=sm_{arch}"), "-cubin".to_string()],
                Target::Ptx(_) => [format!("-arch=compute_{arch}"), "-ptx".to_string()],
            };
            let flags = format.into_iter().chain(flags.iter().map(|flag| flag.to_string())).collect();
            let image = out.join(format!("{stage}.sm_{arch}.{ending}"));
            jobs.push(Job { stage: stage.clone(), source: source.clone(), arch: arch.clone(), flags, image });
        }
    }
    Ok(jobs)
}

/// The list of what was compiled, as Rust source.
fn table(target: Target, jobs: &[Job], release: &str) -> Result<String, String> {
    let mut table = String::from(match target {
        Target::Cubins => "pub(super) static CUBINS: &[Cubin] = &[\n",
        Target::Ptx(_) => "static PTX: &[Ptx] = &[\n",
    });
    for Job { stage, arch, image, .. } in jobs {
        match target {
            Target::Cubins => writeln!(
                table,
                "    Cubin {{ stage: {stage:?}, arch: {arch:?}, kernels: &{:?}, image: include_bytes!({image:?}) }},",
                kernels_of_cubin(image)?
            ),
            Target::Ptx(_) => writeln!(
                table,
                "    Ptx {{ stage: {stage:?}, arch: {arch:?}, kernels: &{:?}, text: include_str!({image:?}) }},",
                kernels_of_ptx(image)?
            ),
        }
        .map_err(|e| e.to_string())?;
    }
    table.push_str("];\n");
    if matches!(target, Target::Cubins) {
        table.push_str("/// Release of the nvcc that compiled them.\n");
        writeln!(table, "pub(super) const RELEASE: &str = {release:?};").map_err(|e| e.to_string())?;
    }
    Ok(table)
}

/// Names and files of the stages.
fn stages() -> Result<Vec<(String, PathBuf)>, String> {
    let folder = Path::new(FOLDER);
    let list = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut found = Vec::new();
    for entry in list {
        let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
        if path.extension().is_some_and(|e| e == "cu")
            && let Some(stem) = path.file_stem().and_then(|s| s.to_str())
        {
            found.push((stem.to_string(), path.clone()));
        }
    }
    found.sort();
    Ok(found)
}

/// Names of the kernels in a cubin, an ELF file in which each has a section for its parameters.
fn kernels_of_cubin(cubin: &Path) -> Result<Vec<String>, String> {
    const SECTION: &[u8] = b"\0.nv.constant0.";
    let image = std::fs::read(cubin).map_err(|e| format!("{}: {e}", cubin.display()))?;
    let starts = image.windows(SECTION.len()).enumerate().filter(|(_, w)| *w == SECTION);
    let mut found: Vec<String> = starts
        .map(|(i, _)| &image[i + SECTION.len()..])
        .map(|rest| {
            rest.iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').map(|b| char::from(*b)).collect()
        })
        .collect();
    found.sort();
    found.dedup();
    Ok(found)
}

/// Names of the kernels in PTX, its entries.
fn kernels_of_ptx(ptx: &Path) -> Result<Vec<String>, String> {
    let text = std::fs::read_to_string(ptx).map_err(|e| format!("{}: {e}", ptx.display()))?;
    let name = |line: &str| Some(line.split_once(".entry ")?.1.split('(').next()?.trim().to_string());
    let mut found: Vec<String> = text.lines().filter_map(name).collect();
    found.sort();
    Ok(found)
}

/// Makes the images of all jobs, as many at a time as cargo allows.
fn compile(compiler: &Compiler, cache: &Cache, jobs: &[Job]) -> Result<(), String> {
    let width = std::env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize).max(1);
    let (next, compiled) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || -> Result<(), String> {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let new = make(compiler, cache, job)?;
            compiled.fetch_add(usize::from(new), Ordering::Relaxed);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..width.min(jobs.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|t| t.join().map_err(|_| "a compiling thread panicked".to_string())?)
    })?;
    // In the build script's log, for who wonders what took so long.
    println!(
        "{} of {} images compiled, the others from {}",
        compiled.into_inner(),
        jobs.len(),
        cache.folder().display()
    );
    cache.prune(KEPT_ENTRIES, STALE);
    Ok(())
}

/// The image of a job, from the cache or from nvcc. Whether it was compiled.
fn make(compiler: &Compiler, cache: &Cache, job: &Job) -> Result<bool, String> {
    let inputs =
        Inputs { source: &job.source, folder: Path::new(FOLDER), flags: &job.flags, compiler: &compiler.identity };
    // Kept beside a cubin: registers, spills, stack frames.
    let log = job.image.with_extension("log");
    let output = Output { image: &job.image, log: &log };
    cache.fetch(&inputs, output, || run(&compiler.nvcc, job, &log))
}

fn run(nvcc: &Path, job: &Job, log: &Path) -> Result<(), String> {
    let mut command = Command::new(nvcc);
    command.args(&job.flags).arg("-o").arg(&job.image).arg(&job.source);
    let shown = format!("{command:?}");
    let output = command.output().map_err(|e| format!("could not run {}: {e}", nvcc.display()))?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        return Err(format!(
            "nvcc failed on {} for sm_{} ({}):\n{shown}\n{text}",
            job.source.display(),
            job.arch,
            output.status
        ));
    }
    std::fs::write(log, text).map_err(|e| format!("{}: {e}", log.display()))
}

fn find_nvcc() -> Result<PathBuf, String> {
    let given = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(path) = given("NVCC") {
        return match path.is_file() {
            true => Ok(path),
            false => Err(format!("NVCC names {}, which is not a file; unset it or give nvcc's path", path.display())),
        };
    }
    let mut tried = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = given(name) {
            let path = home.join("bin/nvcc");
            if path.is_file() {
                return Ok(path);
            }
            return Err(format!(
                "{name} is {}, but there is no {}; unset it or give a CUDA toolkit's folder",
                home.display(),
                path.display()
            ));
        }
        tried.push(format!("{name} (not set)"));
    }
    let folders = std::env::var_os("PATH").map(|p| std::env::split_paths(&p).collect::<Vec<_>>()).unwrap_or_default();
    if let Some(path) = folders.iter().map(|d| d.join("nvcc")).find(|p| p.is_file()) {
        return Ok(path);
    }
    tried.push(format!("the {} folders of PATH", folders.len()));
    let usual = PathBuf::from("/usr/local/cuda/bin/nvcc");
    if usual.is_file() {
        return Ok(usual);
    }
    tried.push(usual.display().to_string());
    Err(format!(
        "no nvcc. Looked at: NVCC (not set), {}. Install CUDA {}.{} or later and set CUDA_HOME to its folder, or NVCC to \
         nvcc itself; `scripts/cuda-kit DIR` gets a toolkit from PyPI",
        tried.join(", "),
        OLDEST_NVCC.0,
        OLDEST_NVCC.1
    ))
}

/// Asks an nvcc for its version.
fn compiler(nvcc: PathBuf) -> Result<Compiler, String> {
    let output = Command::new(&nvcc)
        .arg("--version")
        .output()
        .map_err(|e| format!("could not run {} --version: {e}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.split("release ").nth(1).and_then(|t| t.split(',').next());
    let parsed = version.and_then(|v| {
        let (major, minor) = v.trim().split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    });
    match parsed {
        Some((major, minor)) if (major, minor) >= OLDEST_NVCC => {
            let added = FLAG_VARIABLES.map(|v| format!("{v}={:?}", std::env::var_os(v)));
            let identity = format!("{text}{}", added.join("\n"));
            Ok(Compiler { nvcc, release: format!("{major}.{minor}"), identity })
        }
        Some((major, minor)) => Err(format!(
            "{} is release {major}.{minor}; {}.{} or later is needed. Set NVCC or CUDA_HOME to a newer toolkit",
            nvcc.display(),
            OLDEST_NVCC.0,
            OLDEST_NVCC.1
        )),
        None => Err(format!("{} --version says no release, but: {}", nvcc.display(), text.trim())),
    }
}

fn architectures(nvcc: &Path) -> Result<Vec<String>, String> {
    let value = |name: &&str| std::env::var(name).ok().filter(|v| !v.trim().is_empty());
    let variable = ARCHITECTURE_VARIABLES.into_iter().find(|v| value(v).is_some()).unwrap_or(ARCHITECTURE_VARIABLES[1]);
    let words: Vec<String> = match value(&variable).as_deref().map(str::trim) {
        Some("native") => {
            let found = gpus();
            if found.is_empty() {
                return Err(format!(
                    "{variable} is native, but nvidia-smi found no GPU; give capabilities such as 80,90a"
                ));
            }
            found
        }
        Some(list) => list.split([',', ';', ' ']).filter(|w| !w.is_empty()).map(str::to_string).collect(),
        None => match gpus() {
            found if found.is_empty() => DEFAULT_ARCHITECTURES.map(str::to_string).to_vec(),
            found => found,
        },
    };
    let mut list: Vec<String> = words.iter().map(|w| architecture(variable, w)).collect::<Result<_, _>>()?;
    list.sort();
    list.dedup();
    if let Some(known) = known(nvcc)
        && let Some(bad) = list.iter().find(|a| !known.iter().any(|k| k == a.trim_end_matches(['a', 'f'])))
    {
        return Err(format!(
            "{} does not know sm_{bad} (from {variable} or this machine's GPU); it knows {}",
            nvcc.display(),
            known.join(", ")
        ));
    }
    Ok(list)
}

/// `8.0`, `80`, `90a`, `sm_100f` … without dot and prefix.
fn architecture(variable: &str, word: &str) -> Result<String, String> {
    let plain = word.trim_start_matches("sm_").trim_start_matches("compute_").replace('.', "");
    let digits = plain.trim_end_matches(['a', 'f']);
    match digits.parse::<u32>() {
        Ok(n) if n >= 80 && plain.len() - digits.len() <= 1 => Ok(if plain == "90" { "90a".into() } else { plain }),
        Ok(n) if n < 80 => {
            Err(format!("{variable}: {word} is not supported: the kernels need compute capability 8.0 or later (bf16)"))
        }
        _ => Err(format!("{variable}: {word:?} is no compute capability; give a list such as 80,90a, or native")),
    }
}

/// Compute capabilities of this machine's GPUs.
fn gpus() -> Vec<String> {
    let output = Command::new("nvidia-smi").args(["--query-gpu=compute_cap", "--format=csv,noheader"]).output();
    let Ok(output) = output else { return Vec::new() };
    if !output.status.success() {
        return Vec::new();
    }
    String::from_utf8_lossy(&output.stdout).lines().map(|l| l.trim().to_string()).filter(|l| !l.is_empty()).collect()
}

/// Architectures that this nvcc compiles for; `None` where it does not say.
fn known(nvcc: &Path) -> Option<Vec<String>> {
    let output = Command::new(nvcc).arg("--list-gpu-code").output().ok()?;
    let list: Vec<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|l| l.trim().strip_prefix("sm_"))
        .map(str::to_string)
        .collect();
    (output.status.success() && !list.is_empty()).then_some(list)
}
