//! The decoder against what Hugging Face transformers computed: every folder of the family under `MOEBIUS_GOLDEN`,
//! the repository's own by default.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use candle_core::{D, DType, Device, Result as CandleResult, Tensor};
use moebius::candle::{EpGroup, error_of};
use moebius::checkpoint::Checkpoint;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius_models::{Error, LoadOptions, Qwen3Moe};

/// f32: each of some 20 chained products sums at most 64 terms (relative rounding about √64 · 2⁻²⁴ ≈ 5e-7), in
/// another order than the reference; errors of independent products add up to about √20 · 5e-7 ≈ 2e-6, and the
/// softmaxes and norms between them change that by small factors.
const F32: f64 = 2e-6;
/// Gradients go through the same chain twice, and sum over tokens.
const F32_GRADIENT: f64 = 1e-5;
/// bf16 keeps 8 bits: each rounding is up to 2⁻⁹ ≈ 2e-3 relative, random in sign. The reference rounds between the
/// experts' steps where the layer keeps f32; some ten roundings on the way through two layers and the residual stream
/// give √10 · 2e-3 ≈ 6e-3. (In f32 with the same weights, the distance from the reference is 7.5e-3.)
const BF16: f64 = 1e-2;

/// Most tokens that a rank brings to a call here.
const TOKENS: usize = 1024;

fn shipped() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

/// A folder of a checkpoint and what the reference computed on it.
struct Golden {
    name: String,
    checkpoint: Checkpoint,
    /// No de-quantization, weights in bf16: the reference computed in bf16.
    bf16: bool,
    experts: usize,
    tensors: HashMap<String, Tensor>,
}

impl Golden {
    /// `None` where the folder is of another family, or its golden of a block alone.
    fn open(dir: &Path) -> Option<Self> {
        let text = std::fs::read(dir.join("config.json")).ok()?;
        let config: serde_json::Value = serde_json::from_slice(&text).expect("a config");
        if config["model_type"] != "qwen3_moe" {
            return None;
        }
        let quantized = config.get("quantization_config").is_some() || dir.join("hf_quant_config.json").exists();
        let dtype = config.get("dtype").or(config.get("torch_dtype"));
        let checkpoint = Checkpoint::open(dir).expect("a checkpoint");
        let first = *checkpoint.moe_layers().first().expect("a layer with experts");
        let tensors = candle_core::safetensors::load(dir.join("golden.safetensors"), &Device::Cpu).expect("a golden");
        if !tensors.contains_key("input_ids") {
            return None;
        }
        Some(Self {
            name: dir.file_name()?.to_string_lossy().into_owned(),
            bf16: !quantized && dtype.is_some_and(|d| d == "bfloat16"),
            experts: checkpoint.block_config(first).expect("a block").router.num_experts,
            checkpoint,
            tensors,
        })
    }

    fn qwen3_moe() -> Self {
        Self::open(&shipped().join("qwen3_moe")).expect("the shipped folder")
    }

    fn all() -> Vec<Self> {
        // Relative paths count from the repository's root, as for the other suites.
        let root = std::env::var_os("MOEBIUS_GOLDEN")
            .filter(|root| !root.is_empty())
            .map_or_else(shipped, |root| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(root));
        let mut dirs: Vec<PathBuf> =
            std::fs::read_dir(&root).expect("the folder of folders").map(|e| e.expect("an entry").path()).collect();
        dirs.sort();
        dirs.iter().filter_map(|dir| Self::open(dir)).collect()
    }

    fn ids(&self) -> &Tensor {
        &self.tensors["input_ids"]
    }

    /// As stored, but de-quantized weights in f32, as the reference ran them.
    fn options(&self) -> LoadOptions {
        LoadOptions { dtype: Some(if self.bf16 { DType::BF16 } else { DType::F32 }), trainable: false }
    }

    fn load(&self, group: &EpGroup, options: LoadOptions) -> Qwen3Moe {
        Qwen3Moe::load(&self.checkpoint, group, options).expect("a model")
    }

    /// Rank r runs the next `shares[r]` sequences.
    fn check(&self, options: LoadOptions, shares: &[usize]) {
        let tolerance = if self.bf16 { BF16 } else { F32 };
        let spans = spans(shares);
        let parts = on_ranks(shares.len(), self.experts, |rank, group| {
            let own = self.ids().narrow(0, spans[rank].0, spans[rank].1).expect("rows");
            self.load(&group, options).forward(&own).expect("logits")
        });
        let logits = Tensor::cat(&parts, 0).expect("all rows");
        let logits_error = relative(&logits, &self.tensors["logits"]);
        let (sum, count) = cross_entropy(&logits, self.ids()).expect("a loss");
        let loss = scalar(&sum) / count as f64;
        let expected = scalar(&self.tensors["loss"]);
        let loss_error = (loss - expected).abs() / expected;
        let at = format!("{} over {shares:?}", self.name);
        println!("{at}: logits {logits_error:.1e}, loss {loss_error:.1e}; tolerance {tolerance:.0e}");
        assert!(logits_error <= tolerance, "{at}: logits differ by {logits_error:e}");
        assert!(loss_error <= tolerance, "{at}: loss {loss}, expected {expected}");
    }

    /// Ways to split the sequences over 1, 2, 4 and 8 ranks, as far as the experts divide: evenly, which leaves some
    /// ranks of many without any, and all on the last rank.
    fn splits(&self) -> Vec<Vec<usize>> {
        let rows = self.ids().dim(0).expect("rows");
        let ranks = [1, 2, 4, 8].into_iter().filter(|r| self.experts.is_multiple_of(*r));
        let even = |r: usize| (0..r).map(|i| rows / r + usize::from(i < rows % r)).collect::<Vec<_>>();
        let last = |r: usize| (0..r).map(|i| if i + 1 == r { rows } else { 0 }).collect();
        ranks.flat_map(|r| if r == 1 { vec![even(r)] } else { vec![even(r), last(r)] }).collect()
    }
}

fn scalar(t: &Tensor) -> f64 {
    t.to_dtype(DType::F64).and_then(|t| t.to_scalar()).expect("a scalar")
}

/// Runs `work(rank, group)` on one thread a rank, results in rank order.
fn on_ranks<T: Send>(ranks: usize, experts: usize, work: impl Fn(usize, EpGroup) -> T + Sync) -> Vec<T> {
    let comms = ThreadWorld::create(ranks, Duration::from_secs(60));
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = comms
            .into_iter()
            .enumerate()
            .map(|(rank, comm)| {
                scope.spawn(move || {
                    let config = GroupConfig::new(experts, TOKENS);
                    let group = Group::new(Cpu::new(), Box::new(comm), config).expect("a group");
                    work(rank, EpGroup::new(group))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

fn relative(a: &Tensor, b: &Tensor) -> f64 {
    let f = |t: &Tensor| -> CandleResult<Vec<f64>> { t.to_dtype(DType::F64)?.flatten_all()?.to_vec1() };
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (f(a).expect("values"), f(b).expect("values"));
    let (mut error, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().zip(&b) {
        error += (a - b) * (a - b);
        norm += b * b;
    }
    assert!(norm > 0.0, "the reference is zero");
    (error / norm).sqrt()
}

/// Sum over positions of the cross-entropy of the next token, and the number of positions.
fn cross_entropy(logits: &Tensor, ids: &Tensor) -> CandleResult<(Tensor, usize)> {
    let (b, s, v) = logits.dims3()?;
    if b == 0 {
        // Softmax refuses empty tensors; this zero has the logits as its origin all the same, so that backward
        // reaches the layers, where the other ranks wait.
        return Ok((logits.sum_all()?, 0));
    }
    let logits = logits.narrow(1, 0, s - 1)?.reshape((b * (s - 1), v))?.to_dtype(DType::F32)?;
    let next = ids.narrow(1, 1, s - 1)?.flatten_all()?.unsqueeze(1)?;
    let log_p = candle_nn::ops::log_softmax(&logits, D::Minus1)?.gather(&next, 1)?;
    Ok((log_p.sum_all()?.neg()?, b * (s - 1)))
}

/// First row and number of rows of each rank.
fn spans(shares: &[usize]) -> Vec<(usize, usize)> {
    shares
        .iter()
        .scan(0, |start, &n| {
            *start += n;
            Some((*start - n, n))
        })
        .collect()
}

#[test]
fn logits_and_loss() {
    let folders = Golden::all();
    // Another folder of folders may hold other families only.
    assert!(!folders.is_empty() || std::env::var_os("MOEBIUS_GOLDEN").is_some(), "no qwen3_moe folder");
    for golden in folders {
        for shares in golden.splits() {
            golden.check(golden.options(), &shares);
        }
    }
}

#[test]
fn logits_and_loss_by_differentiable_operations() {
    let golden = Golden::qwen3_moe();
    for shares in golden.splits() {
        golden.check(LoadOptions { trainable: true, ..golden.options() }, &shares);
    }
}

#[test]
fn every_rank_may_run_the_same_sequences() {
    let golden = Golden::qwen3_moe();
    let all = on_ranks(4, golden.experts, |_, group| {
        golden.load(&group, golden.options()).forward(golden.ids()).expect("logits")
    });
    for (rank, logits) in all.iter().enumerate() {
        let error = relative(logits, &golden.tensors["logits"]);
        assert!(error <= F32, "rank {rank}: logits differ by {error:e}");
    }
}

#[test]
fn decoding_gives_the_logits_of_forward() {
    let golden = Golden::qwen3_moe();
    on_ranks(2, golden.experts, |rank, group| {
        let model = golden.load(&group, golden.options());
        let row = |name: &str| golden.tensors[name].narrow(0, rank, 1).expect("a row");
        let (ids, expected) = (row("input_ids"), row("logits"));
        let mut cache = model.cache();
        // A prompt, a longer piece, then token by token.
        let mut start = 0;
        for len in [5, 4, 1, 1, 1] {
            let logits = model.decode(&ids.narrow(1, start, len).expect("tokens"), &mut cache).expect("logits");
            let error = relative(&logits, &expected.narrow(1, start, len).expect("positions"));
            assert!(error <= F32, "tokens {start}..{}: logits differ by {error:e}", start + len);
            start += len;
            assert_eq!(cache.len(), start);
        }
        cache.clear();
        assert!(cache.is_empty());
    });
}

/// Gradient of the mean loss, through the second layer and both attentions, for the first layer's experts.
#[test]
fn gradients_of_the_first_block() {
    let golden = Golden::qwen3_moe();
    let (g, ids) = (&golden.tensors, golden.ids());
    let expert = |e: usize, part: &str| g[&format!("grad.model.layers.0.mlp.experts.{e}.{part}_proj.weight")].clone();
    for shares in [&[2][..], &[1, 1], &[1, 0, 0, 1]] {
        let spans = spans(shares);
        let local = 8 / shares.len();
        let routers = on_ranks(shares.len(), 8, |rank, group| {
            let model = golden.load(&group, LoadOptions { trainable: true, ..golden.options() });
            let own = ids.narrow(0, spans[rank].0, spans[rank].1).expect("rows");
            let logits = model.forward(&own).expect("logits");
            let (sum, _) = cross_entropy(&logits, &own).expect("a loss");
            // The mean is over all ranks' positions: 2 sequences of 12 tokens, the last of each without a successor.
            let grads = (sum / 22.0).expect("a mean").backward().expect("gradients");
            let moe = model.moe(0).expect("experts in layer 0");
            let of = |name: &str| {
                let (_, p) = moe.params().into_iter().find(|(n, _)| *n == name).expect("a parameter");
                grads.get(p).expect("a gradient").clone()
            };
            let (up, down) = (of("experts.up"), of("experts.down"));
            for l in 0..local {
                let e = rank * local + l;
                let gate_up = Tensor::cat(&[expert(e, "gate"), expert(e, "up")], 0).expect("both halves");
                for (part, ours, theirs) in [("up", &up, gate_up), ("down", &down, expert(e, "down"))] {
                    let error = relative(&ours.get(l).expect("an expert"), &theirs);
                    assert!(error <= F32_GRADIENT, "{shares:?}: expert {e} {part} differs by {error:e}");
                }
            }
            of("router.weight")
        });
        let sum = routers.iter().skip(1).fold(routers[0].clone(), |sum, d| (sum + d).expect("a sum"));
        let error = relative(&sum, &g["grad.model.layers.0.mlp.gate.weight"]);
        println!("gradients over {shares:?}: router {error:.1e}");
        assert!(error <= F32_GRADIENT, "{shares:?}: router differs by {error:e}");
    }
}

/// A rank that fails before its layers with experts, or in one, tells the others, which would wait for it there; all go
/// on.
#[test]
fn what_fails_on_a_rank_is_told_to_the_others() {
    let golden = Golden::qwen3_moe();
    let ids = |value: u32, dims: &[usize]| Tensor::full(value, dims, &Device::Cpu).expect("ids");
    for (wrong, word) in [
        (ids(0, &[1, 300]), "300"),
        (ids(0, &[300]), "[300]"),
        (ids(97, &[1, 1]), "97"),
        // Of this the layer itself tells.
        (ids(0, &[5, 250]), "1250"),
    ] {
        on_ranks(2, golden.experts, |rank, group| {
            let model = golden.load(&group, golden.options());
            let token = ids(0, &[1, 1]);
            let error = model.forward(if rank == 1 { &wrong } else { &token }).expect_err("a failure on rank 1");
            assert!(error.to_string().contains(word), "rank {rank}: {error}");
            if rank == 0 {
                let Error::Candle(theirs) = &error else { panic!("{error:?}") };
                let own = error_of(theirs);
                assert!(matches!(own, Some(moebius::Error::Peer { rank: 0, peer: 1, .. })), "{error:?}");
            }
            model.forward(&token).expect("logits");
            // A cache that holds two sequences continues two.
            let mut cache = model.cache();
            model.decode(&ids(0, &[2, 3]), &mut cache).expect("logits");
            let next = ids(0, if rank == 1 { &[1, 1] } else { &[2, 1] });
            model.decode(&next, &mut cache).expect_err("a failure on rank 1");
            cache.clear();
            model.decode(&next, &mut cache).expect("logits");
        });
    }
}

#[test]
fn bad_calls_are_typed_errors() {
    let golden = Golden::qwen3_moe();
    on_ranks(1, golden.experts, |_, group| {
        let model = golden.load(&group, LoadOptions { trainable: true, ..golden.options() });
        let ids = Tensor::zeros((1, 300), DType::U32, &Device::Cpu).expect("ids");
        let message = model.forward(&ids).expect_err("too long").to_string();
        assert!(message.contains("300") && message.contains("256"), "{message}");
        let message = model.forward(&ids.flatten_all().expect("flat")).expect_err("one dimension").to_string();
        assert!(message.contains("[B, S]") && message.contains("[300]"), "{message}");
        let token = ids.narrow(1, 0, 1).expect("a token");
        let message = model.decode(&token, &mut model.cache()).expect_err("trainable").to_string();
        assert!(message.contains("trainable"), "{message}");
        let unknown = Tensor::full(97u32, (1, 1), &Device::Cpu).expect("ids");
        assert!(model.forward(&unknown).is_err(), "97 is not in the vocabulary");
        let integer = LoadOptions { dtype: Some(DType::U8), ..LoadOptions::default() };
        let message = Qwen3Moe::load(&golden.checkpoint, &group, integer).expect_err("no float").to_string();
        assert!(message.contains("U8"), "{message}");
    });
}
