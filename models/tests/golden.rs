//! The decoders against what Hugging Face transformers computed: every folder of a supported family under
//! `MOEBIUS_GOLDEN`, the repository's own and those beside this file by default. Logits, loss, and gradients of the
//! first layer with experts by whole-model backward, over ranks; decoding with the cache.

#[path = "support/checks.rs"]
mod checks;
mod support;

use std::collections::{HashMap, HashSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use moebius::candle::Parameters;
use moebius::checkpoint::Checkpoint;
use moebius::layer::ParamKind;
use moebius_models::{ExpertWeights, LoadOptions, LoadProgress, Model};

use checks::{
    block_gradient_errors, block_gradients, can_step, choices, decoding, pieces, replicated_gradient_errors,
    replicated_gradients, sorted, stepping,
};
use support::{
    BF16, F32, FEWEST_TOKENS, Golden, Rotation, on_ranks, relative, say, scalar, tolerance, tolerance_in_f64,
};

/// Gradients go through the same chain twice, and sum over tokens.
const F32_GRADIENT: f64 = 2e-5;

fn gradient_tolerance(golden: &Golden) -> f64 {
    if golden.bf16 { BF16 } else { F32_GRADIENT }
}

/// Relative errors of logits and loss, rank r running the r-th share of the sequences.
fn forward_errors(golden: &Golden, options: LoadOptions, split: &[usize]) -> [f64; 2] {
    let shares = golden.shares(split);
    let parts = on_ranks(split.len(), golden, |rank, group| {
        let model = golden.load(&group, options);
        let loss = model.loss(&shares[rank]).expect("a loss");
        (model.forward(&shares[rank]).expect("logits"), scalar(&loss.sum), loss.count)
    });
    let logits: Vec<&Tensor> = parts.iter().map(|(logits, ..)| logits).collect();
    let logits = relative(&Tensor::cat(&logits, 0).expect("all rows"), &golden.tensors["logits"]);
    let (sum, count) = parts.iter().fold((0.0, 0), |(sum, count), (_, s, c)| (sum + s, count + c));
    let expected = scalar(&golden.tensors["loss"]);
    [logits, (sum / count as f64 - expected).abs() / expected]
}

/// Every folder, and Kimi-K2's, which transformers has no class for: its publisher's code is DeepSeek-V3's under another
/// `model_type`, and so is what it is to compute.
fn with_kimi(dir: &Path) -> Vec<Golden> {
    let (from, to) = (support::shipped().join("deepseek_v3"), dir.join("kimi_k2"));
    std::fs::create_dir(&to).expect("a folder");
    for name in ["model.safetensors", "golden.safetensors"] {
        std::fs::copy(from.join(name), to.join(name)).expect("a copy");
    }
    let config = std::fs::read_to_string(from.join("config.json")).expect("a config");
    let config = config.replace("\"model_type\": \"deepseek_v3\"", "\"model_type\": \"kimi_k2\"");
    std::fs::write(to.join("config.json"), config).expect("a config");
    let kimi = Golden::open(&to).map(|golden| Golden { elsewhere: false, ..golden }).expect("a golden");
    assert_eq!(kimi.checkpoint.family(), "kimi_k2");
    Golden::all().into_iter().chain([kimi]).collect()
}

/// Prints the table of the families.
#[test]
fn logits_and_loss() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut wrong = Vec::new();
    for golden in with_kimi(dir.path()) {
        let tolerance = tolerance(&golden);
        let mut line = format!("{:26}", golden.name);
        for split in golden.splits() {
            let [logits, loss] = forward_errors(&golden, golden.options(), &split);
            line += &format!(" R={} {logits:.1e}/{loss:.1e}", split.len());
            // Not `>`: it is false for NaN.
            if !(logits <= tolerance && loss <= tolerance) {
                wrong.push(format!("{} over {split:?}: {logits:.1e}, {loss:.1e} > {tolerance:.0e}", golden.name));
            }
        }
        say(&format!("{line} (logits/loss)"));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Inference has fused operations, training has others.
#[test]
fn logits_and_loss_by_differentiable_operations() {
    for golden in Golden::all() {
        let options = LoadOptions { parameters: Parameters::Trainable, ..golden.options() };
        let [logits, loss] = forward_errors(&golden, options, &[golden.ids().dim(0).expect("rows")]);
        assert!(logits.max(loss) <= tolerance(&golden), "{}: {logits:.1e}, {loss:.1e}", golden.name);
    }
}

/// In f64 a decoder is nearer to the exact one than the reference; in 16 bits, and as stored, it runs in that type.
/// (In 16 bits a token may choose another expert than in f32, so logits have no common bound there.)
#[test]
fn every_type_runs() {
    for golden in Golden::all() {
        let logits = |dtype| {
            on_ranks(1, &golden, |_, group| {
                let options = LoadOptions { dtype, ..LoadOptions::default() };
                golden.load(&group, options).forward(golden.ids()).expect("logits")
            })
            .remove(0)
        };
        let error = relative(&logits(Some(DType::F64)), &golden.tensors["logits"]);
        assert!(error <= tolerance_in_f64(&golden), "{}: logits in f64 differ by {error:e}", golden.name);
        for dtype in [Some(DType::BF16), Some(DType::F16), None] {
            let logits = logits(dtype);
            assert!(dtype.is_none_or(|dtype| logits.dtype() == dtype), "{}: {:?}", golden.name, logits.dtype());
            let error = relative(&logits, &golden.tensors["logits"]);
            // What f16 cannot hold, and how many choices other rounding changes, is known of our own folders alone.
            assert!(golden.elsewhere || error < 0.5, "{} in {dtype:?}: logits differ by {error:e}", golden.name);
        }
    }
}

#[test]
fn every_rank_may_run_the_same_sequences() {
    let golden = Golden::named("qwen3_moe");
    let all =
        on_ranks(4, &golden, |_, group| golden.load(&group, golden.options()).forward(golden.ids()).expect("logits"));
    for (rank, logits) in all.iter().enumerate() {
        let error = relative(logits, &golden.tensors["logits"]);
        assert!(error <= F32, "rank {rank}: logits differ by {error:e}");
    }
}

#[test]
fn pieces_are_a_whole_sequence() {
    assert_eq!(pieces(5, 12), [5, 2, 1, 2, 1, 1]);
    for s in 1..30 {
        for first in 1..=s + 1 {
            assert_eq!(pieces(first, s).iter().sum::<usize>(), s, "{first} of {s}");
        }
    }
}

/// A prompt, more pieces, and token by token, against the logits of all tokens at once.
#[test]
fn decoding_gives_the_logits_of_forward() {
    for golden in Golden::all() {
        on_ranks(golden.ranks(2), &golden, |rank, group| {
            let model = golden.load(&group, golden.options());
            decoding(&golden, &model, &golden.row(rank), tolerance(&golden));
        });
    }
}

/// Every family's decoder tells of all its layers, in their order.
#[test]
fn loading_is_told_layer_by_layer() {
    for golden in Golden::all() {
        on_ranks(1, &golden, |_, group| {
            let mut progress = Vec::new();
            let model =
                Model::load_with_progress(&golden.checkpoint, group, golden.options(), &mut |at| progress.push(at));
            let layers = model.expect("a model").num_layers();
            let expected: Vec<_> = (0..=layers).map(|loaded| LoadProgress { loaded, layers }).collect();
            assert_eq!(progress, expected, "{}", golden.name);
        });
    }
}

/// Of every family's cache: the others go on as if the sequences that left had never been there.
#[test]
fn sequences_that_leave_a_cache_change_nothing_for_the_others() {
    for golden in Golden::all() {
        let (_, s) = golden.ids().dims2().expect("[B, S]");
        // Five tokens, then three more, of sequences that leave out three.
        if s < 11 {
            continue;
        }
        on_ranks(1, &golden, |_, group| {
            let model = golden.load(&group, golden.options());
            // Three different sequences, of which the last and the first stay, in this order.
            let row = |start: usize| golden.ids().flatten_all().and_then(|ids| ids.narrow(0, start, s - 3));
            let rows = [0, 1, 3].map(|start| row(start).expect("ids"));
            let ids = |chosen: &[usize], from: usize, len: usize| {
                let chosen: Vec<Tensor> = chosen.iter().map(|i| rows[*i].narrow(0, from, len).expect("ids")).collect();
                Tensor::stack(&chosen, 0).expect("rows")
            };
            let (mut cache, mut expected) = (model.cache(), model.cache());
            model.decode(&ids(&[0, 1, 2], 0, 5), &mut cache).expect("logits");
            model.decode(&ids(&[2, 0], 0, 5), &mut expected).expect("logits");
            let refused = cache.keep_sequences(&[2, 3]).expect_err("not held").to_string();
            assert!(refused.contains("sequence 3: the cache holds 3"), "{refused}");
            cache.keep_sequences(&[2, 0]).expect("held");
            for at in 5..8 {
                let next = ids(&[2, 0], at, 1);
                let logits = model.decode(&next, &mut cache).expect("logits");
                let error = relative(&logits, &model.decode(&next, &mut expected).expect("logits"));
                // Products of another number of rows may sum in another order: twice a forward's error.
                assert!(error <= 2.0 * tolerance(&golden), "{}, token {at}: logits differ by {error:e}", golden.name);
            }
            // None stays: a rank without sequences still steps with the others.
            cache.keep_sequences(&[]).expect("held");
            let none = Tensor::zeros((0, 1), DType::U32, &Device::Cpu).expect("no ids");
            assert_eq!(model.decode(&none, &mut cache).expect("no logits").dims()[0], 0);
        });
    }
}

/// The same over memory that stays: a prompt in two pieces, then steps of a token, twice over the same memory.
#[test]
fn a_stepper_gives_the_logits_of_forward() {
    for golden in Golden::all().into_iter().filter(can_step) {
        on_ranks(golden.ranks(2), &golden, |rank, group| {
            let model = golden.load(&group, golden.options());
            let graphs = stepping(&golden, &model, &golden.row(rank), tolerance(&golden));
            assert_eq!(graphs, 0, "a CPU captures nothing");
        });
    }
}

/// A batch's steps are those of its sequences, and what a stepper cannot do is said.
#[test]
fn a_stepper_has_a_fixed_number_of_sequences_and_tokens() {
    let golden = Golden::named("gpt_oss");
    on_ranks(1, &golden, |_, group| {
        let model = golden.load(&group, golden.options());
        let prompt = Tensor::new(&[[1u32, 2, 3], [7, 5, 9]], &Device::Cpu).expect("ids");
        let greedy = |rows: &[usize]| {
            let mut stepper = model.stepper(rows.len(), 8).expect("a stepper");
            let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
            let rows = Tensor::new(rows, &Device::Cpu).expect("rows");
            stepper.feed(&prompt.index_select(&rows, 0).expect("prompts")).expect("logits");
            let mut found = vec![stepper.next_ids().expect("ids")];
            for _ in 0..5 {
                stepper.step().expect("logits");
                found.push(stepper.next_ids().expect("ids"));
            }
            let full = stepper.step().map(drop).expect_err("no room").to_string();
            assert!(full.contains("room for 8"), "{full}");
            found
        };
        let (both, first, second) = (greedy(&[0, 1]), greedy(&[0]), greedy(&[1]));
        let joined: Vec<Vec<u32>> = first.iter().zip(&second).map(|(a, b)| vec![a[0], b[0]]).collect();
        assert_eq!(both, joined);
        let mut stepper = model.stepper(2, 8).expect("a stepper");
        let refused = |result: moebius_models::Result<()>, word: &str| {
            let text = result.expect_err(word).to_string();
            assert!(text.contains(word), "{text}");
        };
        refused(stepper.feed(&prompt.narrow(0, 0, 1).expect("a row")).map(drop), "2 sequences");
        refused(stepper.set_next_ids(&[1]), "1 ids");
        refused(stepper.set_next_ids(&[1, u32::MAX]), "4294967295");
        refused(model.stepper(1, model.context() + 1).map(drop), "room for");
        refused(model.stepper(1, 0).map(drop), "room for 0");
        refused(model.stepper(usize::MAX, 1).map(drop), "sequences");
    });
    let golden = Golden::named("qwen3_moe");
    on_ranks(1, &golden, |_, group| {
        let model = golden.load(&group, LoadOptions { parameters: Parameters::Trainable, ..golden.options() });
        assert!(model.stepper(1, 4).expect_err("a trainable model").to_string().contains("trainable"));
    });
}

/// Experts that are multiplied as they are stored, by forwards and by steps: on any number of ranks what de-quantized
/// ones give. Products take the same numbers, rounded once more or less.
#[test]
fn experts_as_stored() {
    let mut formats = HashSet::new();
    for golden in Golden::all() {
        let form = golden.checkpoint.block_form(golden.layer()).expect("a form");
        // Some forms are de-quantized: fp8 with a scale a tensor, say.
        let one = moebius::checkpoint::LoadOptions { rank: 0, ranks: 1, dtype: None };
        if !form.is_quantized() || golden.checkpoint.load_quantized(golden.layer(), one).is_err() {
            continue;
        }
        formats.insert(form);
        let options = LoadOptions { experts: ExpertWeights::AsStored, ..golden.options() };
        for split in golden.splits() {
            let [logits, loss] = forward_errors(&golden, options, &split);
            let worst = logits.max(loss);
            assert!(worst <= tolerance(&golden), "{} over {split:?}: {logits:.1e}, {loss:.1e}", golden.name);
        }
        on_ranks(1, &golden, |_, group| {
            let model = golden.load(&group, LoadOptions { parameters: Parameters::Trainable, ..options });
            let moe = model.moe(golden.layer()).expect("experts");
            assert!(moe.quantized().is_some() && moe.param(ParamKind::Up).is_none(), "{}", golden.name);
            let loss = model.loss(golden.ids()).expect("a loss");
            let gradients = loss.sum.backward().expect("gradients");
            let missing = model.vars().iter().filter(|(_, var)| gradients.get(var).is_none()).count();
            assert_eq!(missing, 0, "{}: gradients around the experts", golden.name);
            if golden.rotation() != Rotation::Fixed {
                return;
            }
            let model = golden.load(&group, options);
            let s = golden.ids().dim(1).expect("tokens");
            let mut stepper = model.stepper(golden.ids().dim(0).expect("rows"), s).expect("a stepper");
            stepper.feed(&golden.ids().narrow(1, 0, s - 1).expect("tokens")).expect("logits");
            let last =
                golden.ids().narrow(1, s - 1, 1).and_then(|t| t.flatten_all()?.to_dtype(DType::U32)?.to_vec1::<u32>());
            stepper.set_next_ids(&last.expect("ids")).expect("ids of the vocabulary");
            let expected = golden.tensors["logits"].narrow(1, s - 1, 1).and_then(|t| t.squeeze(1)).expect("logits");
            let error = relative(stepper.step().expect("logits"), &expected);
            assert!(error <= tolerance(&golden), "{}: a step differs by {error:e}", golden.name);
        });
    }
    // Another folder of folders may have fewer.
    assert!(formats.len() == 4 || std::env::var_os("MOEBIUS_GOLDEN").is_some(), "{formats:?}");
}

/// Experts that are quantized after loading are near what they were.
#[test]
fn experts_in_nvfp4() {
    let golden = Golden::named("qwen3_moe");
    let options = LoadOptions { experts: ExpertWeights::Nvfp4, ..golden.options() };
    on_ranks(1, &golden, |_, group| {
        let model = golden.load(&group, options);
        assert!(model.moe(golden.layer()).expect("experts").quantized().is_some());
        let error = relative(&model.forward(golden.ids()).expect("logits"), &golden.tensors["logits"]);
        // Two products a layer with weights that are off by a tenth, beside a residual.
        assert!((1e-4..0.3).contains(&error), "logits differ by {error:e}");
    });
}

/// The same seed gives the same weights, on however many ranks those that all of them hold; nothing is read.
#[test]
fn random_weights() {
    let golden = Golden::named("qwen3_moe");
    let config = Checkpoint::open_config(golden.checkpoint.dir()).expect("config.json");
    assert_eq!(config.names().count(), 0);
    let logits = |ranks: usize, seed: u64| {
        on_ranks(ranks, &golden, |_, group| {
            let options = LoadOptions { random: Some(seed), dtype: Some(DType::F32), ..LoadOptions::default() };
            let model = Model::load_on(&config, &group, options).expect("a model");
            let hidden = model.hidden(golden.ids()).expect("hidden states");
            model.logits(&hidden).expect("logits")
        })
    };
    let (first, again, other) = (logits(1, 1).remove(0), logits(1, 1).remove(0), logits(1, 2).remove(0));
    assert_eq!(relative(&first, &again), 0.0);
    assert!(relative(&first, &other) > 0.1);
    let shared = logits(2, 1);
    assert_eq!(relative(&shared[0], &shared[1]), 0.0, "all but the experts is one on both ranks");
    // Logits of normalized hidden states by weights of variance 1 / H are of variance 1.
    let square = first.sqr().and_then(|t| t.mean_all()?.to_scalar::<f32>()).expect("a number");
    assert!((0.3..3.0).contains(&square), "mean square {square}");
    on_ranks(1, &golden, |_, group| {
        let options = LoadOptions { random: Some(1), parameters: Parameters::Trainable, ..LoadOptions::default() };
        let model = Model::load_on(&config, &group, options).expect("a model");
        let gradients = model.loss(golden.ids()).expect("a loss").sum.backward().expect("gradients");
        assert!(!model.vars().is_empty());
        assert!(model.vars().iter().all(|(_, var)| gradients.get(var).is_some()), "every weight trains");
        let experts = model.moe(golden.layer()).expect("experts").vars();
        assert!(experts.len() >= 3 && experts.iter().all(|var| gradients.get(var).is_some()));
    });
    let error = Checkpoint::open(golden.checkpoint.dir())
        .and_then(|_| config.load_block(0, moebius::checkpoint::LoadOptions { rank: 0, ranks: 1, dtype: None }));
    assert!(error.is_err(), "there is nothing to load");
}

/// The choices of the first layer with experts, exactly.
#[test]
fn choices_of_the_first_block() {
    for golden in Golden::all() {
        let Some(expected) = golden.tensors.get("topk_ids") else { continue };
        let found = on_ranks(1, &golden, |_, group| choices(&golden, &golden.load(&group, golden.options())));
        assert_eq!(found[0], sorted(expected), "{}: other choices", golden.name);
    }
}

/// Gradients of the mean loss by backward through the whole model: of what enters and leaves the first layer with
/// experts, and of all its parameters, at R = 1, 2, 4.
#[test]
fn gradients_of_the_first_block() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut wrong = Vec::new();
    for golden in with_kimi(dir.path()) {
        if !golden.tensors.contains_key("grad_moe_output") {
            continue;
        }
        let mut line = format!("{:26}", golden.name);
        for split in golden.splits().into_iter().filter(|split| split.len() <= 4) {
            let shares = golden.shares(&split);
            let parts = on_ranks(split.len(), &golden, |rank, group| {
                let model = golden.load(&group, LoadOptions { parameters: Parameters::Trainable, ..golden.options() });
                block_gradients(&golden, &model, &shares[rank]).expect("gradients")
            });
            let errors = block_gradient_errors(&golden, &parts);
            let worst = errors.iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("errors");
            line += &format!(" R={} {:.1e}", split.len(), worst.1);
            // Not `>`: it is false for NaN.
            if worst.1.is_nan() || worst.1 > gradient_tolerance(&golden) {
                wrong.push(format!("{} over {split:?}: gradient of {} differs by {:e}", golden.name, worst.0, worst.1));
            }
        }
        say(&format!("{line} (worst gradient)"));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Gradients of parameters outside the experts, where a folder has them, over one rank and two.
#[test]
fn gradients_of_replicated_parameters() {
    let mut wrong = Vec::new();
    for golden in Golden::all() {
        for split in golden.splits().into_iter().filter(|split| split.len() <= 2) {
            let shares = golden.shares(&split);
            let parts = on_ranks(split.len(), &golden, |rank, group| {
                let model = golden.load(&group, LoadOptions { parameters: Parameters::Trainable, ..golden.options() });
                replicated_gradients(&golden, &model, &shares[rank])
            });
            for (name, error) in replicated_gradient_errors(&golden, &parts) {
                if error.is_nan() || error > gradient_tolerance(&golden) {
                    wrong.push(format!("{} over {split:?}: gradient of {name} differs by {error:.1e}", golden.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A rank without a next token, of no sequences or of sequences of one token, adds a loss of 0, and its backward takes part
/// in that of the layers, where the other rank waits.
#[test]
fn a_rank_without_next_tokens_takes_part_in_backward() {
    let golden = Golden::named("qwen3_moe");
    let expected = scalar(&golden.tensors["loss"]);
    for dims in [(0, 5), (2, 1)] {
        let none = Tensor::zeros(dims, DType::U32, &Device::Cpu).expect("ids");
        on_ranks(2, &golden, |rank, group| {
            let model = golden.load(&group, LoadOptions { parameters: Parameters::Trainable, ..golden.options() });
            let loss = model.loss(if rank == 0 { golden.ids() } else { &none }).expect("a loss");
            let gradients = loss.sum.backward().expect("gradients");
            let experts = model.moe(golden.layer()).expect("experts").vars();
            assert!(experts.iter().all(|var| gradients.get(var).is_some()), "rank {rank} of {dims:?}");
            let mean = scalar(&loss.mean().expect("a mean"));
            let error = if rank == 0 { (mean - expected).abs() / expected } else { mean };
            assert!(error <= tolerance(&golden) && (rank == 0 || error == 0.0), "rank {rank} of {dims:?}: {mean}");
        });
    }
}

/// A folder of more token ids than the repository's have, most of them of one rank: they are checked as others are.
#[test]
fn folders_of_many_tokens_are_checked() {
    let few = Golden::named("qwen3_moe");
    let (rows, tokens) = few.ids().dims2().expect("[B, S]");
    let times = 1 + 2 * FEWEST_TOKENS / (rows * tokens);
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(few.checkpoint.dir().join(name), folder.path().join(name)).expect("a copy");
    }
    // The same sequences many times have the same logits, and the same mean of their losses.
    let many = |name: &str| Tensor::cat(&vec![&few.tensors[name]; times], 0).expect("rows");
    let mut tensors: HashMap<_, _> =
        ["input_ids", "logits"].into_iter().map(|name| (name.to_string(), many(name))).collect();
    tensors.insert("loss".into(), few.tensors["loss"].clone());
    candle_core::safetensors::save(&tensors, folder.path().join("golden.safetensors")).expect("a golden");
    let golden = Golden::open(folder.path()).expect("a golden");
    assert!(golden.ids().elem_count() > 2 * FEWEST_TOKENS);
    for split in golden.splits().into_iter().filter(|split| split.len() <= 2) {
        let [logits, loss] = forward_errors(&golden, golden.options(), &split);
        assert!(logits.max(loss) <= tolerance(&golden), "over {split:?}: {logits:.1e}, {loss:.1e}");
    }
    on_ranks(2, &golden, |rank, group| {
        let model = golden.load(&group, golden.options());
        decoding(&golden, &model, &golden.row(rank), tolerance(&golden));
    });
}

/// Folders of other families, without a golden, or with one of a block alone are none of this suite's, and end it not.
#[test]
fn folders_of_others_are_passed_over() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let own = support::shipped().join("mixtral");
    let write = |model_type: &str| {
        let config = std::fs::read_to_string(own.join("config.json"))?.replace("\"mixtral\"", model_type);
        std::fs::write(folder.path().join("config.json"), config)
    };
    std::fs::copy(own.join("model.safetensors"), folder.path().join("model.safetensors"))?;
    write("\"mixtral\"")?;
    assert!(Golden::open(folder.path()).is_none(), "no golden");
    std::fs::copy(own.join("golden.safetensors"), folder.path().join("golden.safetensors"))?;
    let golden = Golden::open(folder.path()).ok_or("a golden")?;
    assert!(golden.elsewhere && !Golden::named("mixtral").elsewhere);
    for other in ["\"jamba\"", "\"deepseek_v4\"", "\"nobody_knows\""] {
        write(other)?;
        assert!(Golden::open(folder.path()).is_none(), "{other}");
    }
    let x = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
    candle_core::safetensors::save(&HashMap::from([("x", x)]), folder.path().join("golden.safetensors"))?;
    write("\"mixtral\"")?;
    assert!(Golden::open(folder.path()).is_none(), "no ids");
    Ok(())
}
