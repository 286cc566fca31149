//! Dynamic scaling of rotations (NTK): up to the original length a cache's logits are those of a forward; beyond it every
//! token changes the frequencies of all, and a step turns all keys by those of the present length.

mod support;

use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{DType, Device, IndexOp, Tensor};
use moebius::checkpoint::Checkpoint;
use moebius_models::generate::{Generator, Request};
use moebius_models::{LoadOptions, Model};
use serde_json::json;

use support::{F32, Golden, on_ranks, relative};

/// Length up to which frequencies are as they are without scaling.
const ORIGINAL: usize = 16;
const FACTOR: usize = 4;

/// The folder of transformers' golden, of one layer.
fn of_one_layer() -> Golden {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_moe_dynamic");
    Golden::open(&dir).expect("a golden")
}

/// A folder of two layers with such a scaling, whose golden's logits are of another.
fn of_two_layers(to: &Path) -> Golden {
    let from = support::shipped().join("qwen3_moe");
    for name in ["model.safetensors", "golden.safetensors"] {
        std::fs::copy(from.join(name), to.join(name)).expect("a copy");
    }
    let config = std::fs::read(from.join("config.json")).expect("a config");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    config["max_position_embeddings"] = ORIGINAL.into();
    config["rope_parameters"] = json!({"rope_type": "dynamic", "rope_theta": 1e4, "factor": FACTOR});
    std::fs::write(to.join("config.json"), config.to_string()).expect("a config");
    Golden::open(to).expect("a golden")
}

/// `len` tokens of a rank's own.
fn ids(golden: &Golden, rank: usize, len: usize) -> Tensor {
    let of = |at: usize| ((at * 13 + at * at + 7 * rank) % golden.vocabulary()) as u32;
    Tensor::from_vec((0..len).map(of).collect(), (1, len), &Device::Cpu).expect("ids")
}

fn part(ids: &Tensor, start: usize, len: usize) -> Tensor {
    ids.narrow(1, start, len).expect("tokens")
}

/// Logits of the last of these tokens by a forward of all.
fn last_of_forward(model: &Model, ids: &Tensor) -> Tensor {
    model.forward(ids).and_then(|logits| Ok(logits.i((.., ids.dim(1)? - 1..))?)).expect("logits")
}

#[test]
fn up_to_the_original_length_a_cache_gives_the_logits_of_a_forward() {
    let dir = tempfile::tempdir().expect("a folder");
    for golden in [of_one_layer(), of_two_layers(dir.path())] {
        for ranks in [1, 2] {
            on_ranks(ranks, &golden, |rank, group| {
                let model = golden.load(&group, golden.options());
                assert_eq!(model.context(), ORIGINAL * FACTOR);
                for len in [ORIGINAL - 3, ORIGINAL] {
                    let ids = ids(&golden, rank, len);
                    let (expected, mut cache) = (model.forward(&ids).expect("logits"), model.cache());
                    for start in (0..len).step_by(4) {
                        let tokens = 4.min(len - start);
                        let logits = model.decode(&part(&ids, start, tokens), &mut cache).expect("logits");
                        let error = relative(&logits, &expected.narrow(1, start, tokens).expect("positions"));
                        assert!(error <= 2.0 * F32, "{}, {len} tokens, from {start}: {error:e}", golden.name);
                    }
                }
            });
        }
    }
}

/// A piece that crosses the original length, or begins beyond it, has the logits of a forward as far as it is all there is:
/// every layer sees the same frequencies.
#[test]
fn a_prompt_beyond_the_original_length_has_the_logits_of_a_forward() {
    let dir = tempfile::tempdir().expect("a folder");
    for golden in [of_one_layer(), of_two_layers(dir.path())] {
        on_ranks(2, &golden, |rank, group| {
            let model = golden.load(&group, golden.options());
            let mut before: Option<Tensor> = None;
            for len in [ORIGINAL + 1, 2 * ORIGINAL, FACTOR * ORIGINAL] {
                let ids = ids(&golden, rank, len);
                let expected = model.forward(&ids).expect("logits");
                let logits = model.decode(&ids, &mut model.cache()).expect("logits");
                let error = relative(&logits, &expected);
                assert!(error <= 2.0 * F32, "{}, {len} tokens: {error:e}", golden.name);
                // The same first tokens in a longer sequence are turned otherwise.
                let first = expected.narrow(1, 0, ORIGINAL + 1).expect("positions");
                let moved = before.replace(first.clone()).map(|before| relative(&first, &before));
                assert!(moved.is_none_or(|moved| moved > 1e-3), "{}: rotations stay: {moved:?}", golden.name);
            }
        });
    }
}

/// In a single layer a step sees what a forward of the tokens so far sees: keys are kept as they were before their
/// rotation, and turned by the present frequencies. In a second layer they come of hidden states of an earlier length.
#[test]
fn beyond_the_original_length_a_step_turns_all_keys_anew() {
    let dir = tempfile::tempdir().expect("a folder");
    for (golden, layers) in [(of_one_layer(), 1), (of_two_layers(dir.path()), 2)] {
        for ranks in [1, 2] {
            on_ranks(ranks, &golden, |rank, group| {
                let model = golden.load(&group, golden.options());
                assert_eq!(model.num_layers(), layers);
                for prompt in [ORIGINAL - 1, ORIGINAL, ORIGINAL + 5] {
                    let ids = ids(&golden, rank, 3 * ORIGINAL);
                    let mut cache = model.cache();
                    model.decode(&part(&ids, 0, prompt), &mut cache).expect("logits");
                    let mut furthest = 0f64;
                    for at in prompt..3 * ORIGINAL {
                        let logits = model.decode(&part(&ids, at, 1), &mut cache).expect("logits");
                        let error = relative(&logits, &last_of_forward(&model, &part(&ids, 0, at + 1)));
                        let same = layers == 1 || at < ORIGINAL;
                        assert!(!same || error <= 2.0 * F32, "{}, token {at}: {error:e}", golden.name);
                        furthest = furthest.max(error);
                    }
                    // As `models/README.md` says.
                    assert_eq!(layers == 2, furthest > 1e-4, "{} behind {prompt}: {furthest:e}", golden.name);
                }
            });
        }
    }
}

/// Texts from below the original length to the end of the context, against whole forwards of the tokens so far.
#[test]
fn greedy_tokens_of_one_layer_are_those_of_forwards() {
    let golden = of_one_layer();
    let model = Model::load(golden.checkpoint.dir(), &Device::Cpu, LoadOptions::default()).expect("a model");
    let config = Checkpoint::open_config(golden.checkpoint.dir()).expect("a config");
    assert_eq!(config.config()["rope_parameters"]["rope_type"], "dynamic");
    let prompt: Vec<u32> = ids(&golden, 0, 10).flatten_all().and_then(|ids| ids.to_vec1()).expect("ids");
    let room = FACTOR * ORIGINAL - prompt.len() + 1;
    let mut expected = prompt.clone();
    for _ in 0..room {
        if expected.len() == model.context() {
            break;
        }
        let ids = Tensor::new(vec![expected.clone()], &Device::Cpu).expect("ids");
        let logits = last_of_forward(&model, &ids).flatten_all().and_then(|t| t.to_dtype(DType::F32)?.to_vec1::<f32>());
        let logits = logits.expect("logits");
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        assert!(logits[order[0]] - logits[order[1]] > 5e-5, "a tie: choose another prompt");
        expected.push(order[0] as u32);
    }
    let generator = Generator::new(&model, None).expect("a generator");
    let requests = [Request::new(prompt.clone(), expected.len() - prompt.len())];
    let (outputs, _) = generator.run(&requests, |_| ControlFlow::Continue(())).expect("a text");
    assert_eq!(outputs[0].tokens, expected[prompt.len()..]);
}
