//! Folders with what Hugging Face transformers computed on them, and ranks that are threads.
#![allow(dead_code, reason = "every suite takes a part")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use moebius::candle::EpGroup;
use moebius::checkpoint::{Checkpoint, OpenOptions};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::{CheckpointError, Error};
use moebius_models::{LoadOptions, Model, families};

/// Tokens that a rank may bring to a call, where its folder has no more.
pub const FEWEST_TOKENS: usize = 4096;

/// f32: each of some 20 chained products sums at most 256 terms (relative rounding about √256 · 2⁻²⁴ ≈ 1e-6), in
/// another order than the reference; errors of independent products add up to about √20 · 1e-6 ≈ 4e-6, and the
/// softmaxes and norms between them change that by small factors.
pub const F32: f64 = 5e-6;
/// f32 of a folder from elsewhere, whose sums or layers may be more: errors grow by the square root of either, and
/// sixteen times as many (sums of 4096 terms, or 32 layers) give four times as much.
pub const F32_ELSEWHERE: f64 = 2e-5;
/// bf16 keeps 8 bits: each rounding is up to 2⁻⁹ ≈ 2e-3 relative, random in sign. The reference rounds between the
/// experts' steps where the layer keeps f32; some ten roundings on the way through two layers and the residual stream
/// give √10 · 2e-3 ≈ 6e-3. (In f32 with the same weights, the distance from the reference is 7.5e-3.)
pub const BF16: f64 = 1e-2;

/// Relative error of a forward's logits.
pub fn tolerance(golden: &Golden) -> f64 {
    match (golden.bf16, golden.elsewhere) {
        (true, _) => BF16,
        (false, true) => F32_ELSEWHERE,
        (false, false) => F32,
    }
}

/// Relative error of logits that no 16-bit type rounds, of the same weights: beside a reference in bf16 both its own
/// rounding and that of a forward in bf16 lie between, each of them [`BF16`] at most.
pub fn tolerance_in_f64(golden: &Golden) -> f64 {
    if golden.bf16 && golden.elsewhere { 2.0 * BF16 } else { tolerance(golden) }
}

/// The repository's folders.
pub fn shipped() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

/// A folder of a checkpoint and what the reference computed on it.
#[derive(Debug)]
pub struct Golden {
    pub name: String,
    pub checkpoint: Checkpoint,
    /// No de-quantization, weights in bf16: the reference computed in bf16.
    pub bf16: bool,
    /// It is none of the repository's own.
    pub elsewhere: bool,
    pub experts: usize,
    pub tensors: HashMap<String, Tensor>,
}

impl Golden {
    /// `None` where the folder is of a family without a decoder, or its golden of a block alone.
    pub fn open(dir: &Path) -> Option<Self> {
        let (config, golden) = (dir.join("config.json"), dir.join("golden.safetensors"));
        if !(config.is_file() && golden.is_file()) {
            return None;
        }
        let mut options = OpenOptions::default();
        // The folder is the test's own, and may be of links.
        options.follow_links = true;
        let checkpoint = match Checkpoint::open_with(dir, options) {
            Ok(checkpoint) => checkpoint,
            Err(Error::Checkpoint(
                CheckpointError::UnknownFamily { found, .. } | CheckpointError::UnsupportedFamily { found, .. },
            )) => {
                say(&format!("{}: passed over, a folder of {found}", dir.display()));
                return None;
            }
            Err(error) => panic!("{}: {error}", dir.display()),
        };
        if !families().any(|family| family == checkpoint.family()) {
            return None;
        }
        let first = *checkpoint.moe_layers().first()?;
        let quantized = checkpoint.block_form(first).expect("a form").is_quantized();
        let tensors = candle_core::safetensors::load(golden, &Device::Cpu).expect("a golden");
        if !tensors.contains_key("input_ids") {
            return None;
        }
        let own = own_roots().iter().any(|root| dir.parent().is_some_and(|parent| same_folder(parent, root)));
        Some(Self {
            name: dir.file_name()?.to_string_lossy().into_owned(),
            bf16: !quantized && checkpoint.model_dtype() == Some(moebius::DType::BF16),
            elsewhere: !own,
            experts: checkpoint.block_config(first).expect("a block").router.num_experts,
            checkpoint,
            tensors,
        })
    }

    pub fn named(name: &str) -> Self {
        Self::open(&shipped().join(name)).expect("a shipped folder")
    }

    /// Every folder under `MOEBIUS_GOLDEN`; the repository's own and this crate's by default.
    pub fn all() -> Vec<Self> {
        // Relative paths count from the repository's root, as for the other suites.
        let crate_dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let roots = match std::env::var_os("MOEBIUS_GOLDEN").filter(|root| !root.is_empty()) {
            Some(root) => vec![crate_dir.join("..").join(root)],
            None => own_roots().to_vec(),
        };
        let of = |root: &PathBuf| std::fs::read_dir(root).expect("the folder of folders");
        let mut dirs: Vec<PathBuf> = roots.iter().flat_map(of).map(|e| e.expect("an entry").path()).collect();
        dirs.sort();
        let found: Vec<Self> = dirs.iter().filter_map(|dir| Self::open(dir)).collect();
        // A test over no folder at all would hold whatever the code does; folders of other suites alone are none of this
        // one's.
        let any = || dirs.iter().any(|dir| dir.join("config.json").is_file());
        assert!(!found.is_empty() || any(), "no checkpoint's folder in {roots:?}");
        found
    }

    /// The text model's configuration, which multimodal wrappers keep in an object of its own.
    pub fn config(&self) -> &serde_json::Value {
        let root = self.checkpoint.config();
        root.get("text_config").filter(|text| text.is_object()).unwrap_or(root)
    }

    pub fn vocabulary(&self) -> usize {
        self.config()["vocab_size"].as_u64().expect("vocab_size") as usize
    }

    /// The configuration's rotary part, wherever it stands.
    pub fn rope(&self) -> &serde_json::Value {
        let of = |key: &str| self.config().get(key).filter(|value| !value.is_null());
        of("rope_scaling").or(of("rope_parameters")).unwrap_or(&serde_json::Value::Null)
    }

    pub fn rotation(&self) -> Rotation {
        let rope = self.rope();
        let kind = rope["rope_type"].as_str().or(rope["type"].as_str()).unwrap_or("default");
        // PhiMoE's has another factor beyond the original length with any scaling.
        let phi = self.checkpoint.family() == "phimoe" && kind != "default";
        match kind {
            _ if kind == "longrope" || kind == "su" || phi => {
                let config = self.config();
                let keys = ["original_max_position_embeddings", "max_position_embeddings"];
                let length = [&rope[keys[0]], &config[keys[0]], &config[keys[1]]].into_iter().find_map(|n| n.as_u64());
                Rotation::TwoFrequencies { original: length.expect("a length") as usize }
            }
            "dynamic" if rope["alpha"].is_null() => Rotation::OfEveryLength,
            _ => Rotation::Fixed,
        }
    }

    /// The sequence that a rank takes where each has one.
    pub fn row(&self, rank: usize) -> Tensor {
        let row = rank % self.ids().dim(0).expect("rows");
        self.ids().narrow(0, row, 1).expect("a row")
    }

    /// As many ranks up to `most` as the experts can be dealt to.
    pub fn ranks(&self, most: usize) -> usize {
        (1..=most).rev().find(|ranks| self.experts.is_multiple_of(*ranks)).unwrap_or(1)
    }

    pub fn ids(&self) -> &Tensor {
        &self.tensors["input_ids"]
    }

    /// The first layer with experts, of which the goldens of a block are.
    pub fn layer(&self) -> usize {
        self.checkpoint.moe_layers()[0]
    }

    /// As stored, but de-quantized weights in f32, as the reference ran them.
    pub fn options(&self) -> LoadOptions {
        LoadOptions { dtype: Some(if self.bf16 { DType::BF16 } else { DType::F32 }), ..LoadOptions::default() }
    }

    pub fn load(&self, group: &EpGroup, options: LoadOptions) -> Model {
        Model::load_on(&self.checkpoint, group, options).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// Ways to split the sequences over 1, 2, 4 and 8 ranks, as far as the experts divide: evenly, which leaves some
    /// ranks of many without any, and all on the last rank.
    pub fn splits(&self) -> Vec<Vec<usize>> {
        let rows = self.ids().dim(0).expect("rows");
        let ranks = [1, 2, 4, 8].into_iter().filter(|r| self.experts.is_multiple_of(*r));
        let even = |r: usize| (0..r).map(|i| rows / r + usize::from(i < rows % r)).collect::<Vec<_>>();
        let last = |r: usize| (0..r).map(|i| if i + 1 == r { rows } else { 0 }).collect();
        ranks.flat_map(|r| if r == 1 { vec![even(r)] } else { vec![even(r), last(r)] }).collect()
    }

    /// The sequences of each rank, of a split.
    pub fn shares(&self, split: &[usize]) -> Vec<Tensor> {
        let mut start = 0;
        let part = |&rows: &usize| {
            start += rows;
            self.ids().narrow(0, start - rows, rows).expect("rows")
        };
        split.iter().map(part).collect()
    }
}

/// How a model's rotation depends on the length of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// Not at all: it can be had with a stepper.
    Fixed,
    /// It is another one beyond so many tokens.
    TwoFrequencies { original: usize },
    /// It changes with every token beyond some length.
    OfEveryLength,
}

/// The repository's folders and this crate's.
fn own_roots() -> [PathBuf; 2] {
    [shipped(), PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")]
}

fn same_folder(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

pub fn scalar(t: &Tensor) -> f64 {
    t.to_dtype(DType::F64).and_then(|t| t.to_scalar()).expect("a scalar")
}

/// Runs `work(rank, group)` on one thread a rank, results in rank order. The group is for the folder's experts, and any rank
/// may bring all of the folder's tokens.
pub fn on_ranks<T: Send>(ranks: usize, golden: &Golden, work: impl Fn(usize, EpGroup) -> T + Sync) -> Vec<T> {
    let comms = ThreadWorld::create(ranks, Duration::from_secs(60));
    let (experts, tokens) = (golden.experts, golden.ids().elem_count().max(FEWEST_TOKENS));
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = comms
            .into_iter()
            .enumerate()
            .map(|(rank, comm)| {
                scope.spawn(move || {
                    // Room for the rows of 64 tokens a rank, however they choose among 16 experts.
                    let config = GroupConfig { max_rows: ranks * 64 * 16, ..GroupConfig::new(experts, tokens) };
                    let group = Group::new(Cpu::new(), Box::new(comm), config).expect("a group");
                    work(rank, EpGroup::new(group))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

/// ‖a − b‖ / ‖b‖.
pub fn relative(a: &Tensor, b: &Tensor) -> f64 {
    let f = |t: &Tensor| -> CandleResult<Vec<f64>> { t.to_dtype(DType::F64)?.flatten_all()?.to_vec1() };
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (f(a).expect("values"), f(b).expect("values"));
    let (mut error, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().zip(&b) {
        error += (a - b) * (a - b);
        norm += b * b;
    }
    // An expert whose tokens have no next token has no gradient: a reference of zeros is met by zeros alone.
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// Prints past the test harness, which keeps the output of tests that pass to itself.
pub fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}
