//! Generation over a cache that stays against one that grows: the same tokens and texts, of every family.

#[path = "support/checks.rs"]
mod checks;
mod support;

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use moebius::cpu::ThreadWorld;
use moebius_models::generate::{
    CacheKind, CacheRequest, Decoder, EndOf, Event, Finish, Generator, Output, OverRanks, Request, Sampling, Tokenizer,
};
use moebius_models::{LoadOptions, Model};

use checks::resizing;
use support::{Golden, Rotation, on_ranks, shipped, tolerance};

const KINDS: [CacheKind; 2] = [CacheKind::Static, CacheKind::Growing];

fn go(_: Event<'_>) -> ControlFlow<EndOf> {
    ControlFlow::Continue(())
}

/// Prompts of several lengths, half of them sampled, that end after different numbers of tokens: by a stop token, or as
/// many as were asked for. The last ones go on alone, past the half of the batch.
fn requests(vocabulary: usize) -> Vec<Request> {
    [3usize, 9, 1, 5, 9, 4]
        .into_iter()
        .enumerate()
        .map(|(i, len)| {
            let prompt = (0..len).map(|at| ((at * 13 + 7 * i) % vocabulary) as u32).collect();
            let mut request = Request::new(prompt, 3 + 2 * i);
            if i % 2 == 1 {
                request.sampling = Sampling { temperature: 0.9, top_k: 40, seed: i as u64, ..request.sampling };
            }
            request.stop_tokens = vec![11];
            request
        })
        .collect()
}

/// Outputs of `requests`, dealt to the ranks in turn, each rank's by both kinds of cache.
fn by_kinds(golden: &Golden, ranks: usize, requests: &[Request]) -> Vec<[Vec<Output>; 2]> {
    let worlds = KINDS.map(|_| ThreadWorld::create(ranks, Duration::from_secs(60)).into_iter().map(Some).collect());
    let worlds = worlds.map(|world: Vec<_>| Mutex::new(world));
    on_ranks(ranks, golden, |rank, group| {
        // In bf16 two tokens are often alike, and caches that sum in other orders would take one or the other.
        let model = golden.load(&group, LoadOptions { dtype: Some(DType::F32), ..golden.options() });
        let fits = |request: &&Request| request.prompt.len() + request.max_tokens <= model.context();
        let own: Vec<Request> = requests.iter().filter(fits).skip(rank).step_by(ranks).cloned().collect();
        let run = |kind: usize| {
            let steps = worlds[kind].lock().expect("a world")[rank].take().expect("one of each rank");
            let decoder = OverRanks::new(&model, Box::new(steps));
            let generator = Generator::new(&decoder, None).expect("a generator").cache(KINDS[kind]);
            generator.run(&own, go).unwrap_or_else(|e| panic!("{}, {:?}: {e}", golden.name, KINDS[kind])).0
        };
        [run(0), run(1)]
    })
}

/// A rank without sequences takes part for as long as others have some, however long that is.
#[test]
fn a_cache_of_no_sequences_is_never_full() {
    let model = Model::load(shipped().join("qwen3_moe"), &Device::Cpu, LoadOptions::default()).expect("a model");
    let none = Tensor::zeros((0, 1), DType::U32, &Device::Cpu).expect("ids");
    for kind in KINDS {
        let request = CacheRequest { sequences: 0, prompt_tokens: 1, max_tokens: model.context(), kind };
        let mut cache = Decoder::cache(&model, request).expect("a cache");
        for step in 0..model.context() + 2 {
            let logits = Decoder::step(&model, &none, &mut cache);
            assert_eq!(logits.unwrap_or_else(|e| panic!("{kind:?}, step {step}: {e}")).dims()[0], 0);
        }
    }
}

/// Four ranks have one prompt or two each. Logits of the two kinds differ by rounding: those of tokens that are compared
/// here are further apart (a tie would be another prompt's business).
#[test]
fn both_kinds_give_the_same_tokens_in_every_family() {
    let mut finishes = HashSet::new();
    for golden in Golden::all() {
        let requests = requests(golden.vocabulary());
        for ranks in [1, 2, 4].into_iter().filter(|ranks| golden.experts.is_multiple_of(*ranks)) {
            for (rank, [fixed, growing]) in by_kinds(&golden, ranks, &requests).into_iter().enumerate() {
                assert_eq!(fixed, growing, "{}, rank {rank} of {ranks}", golden.name);
                finishes.extend(growing.iter().map(|output| matches!(output.finish, Finish::MaxTokens)));
            }
        }
    }
    // Texts of both ends are among them; those of other folders may all be as long as was asked for.
    assert!(finishes.len() == 2 || std::env::var_os("MOEBIUS_GOLDEN").is_some(), "{finishes:?}");
}

/// One prompt over four ranks: three have none, and step with the first.
#[test]
fn ranks_without_prompts_step_on() {
    let golden = Golden::named("qwen3_moe");
    let requests = &requests(97)[5..];
    let outputs = by_kinds(&golden, 4, requests);
    let [fixed, growing] = &outputs[0];
    assert_eq!((fixed.len(), fixed), (1, growing));
    assert!(outputs[1..].iter().flatten().all(Vec::is_empty));
}

/// Which kind a model has, and when sequences that have ended leave.
#[test]
fn a_static_cache_is_had_where_rotations_stay_and_moves_when_half_have_ended() {
    let of = |name: &str, sequences: usize, kind: CacheKind| {
        let golden = Golden::named(name);
        let [(got, kept)] = &on_ranks(1, &golden, |_, group| {
            let model = golden.load(&group, golden.options());
            let request = CacheRequest { sequences, prompt_tokens: 2, max_tokens: 9, kind };
            let mut cache = Decoder::cache(&model, request).expect("a cache");
            if sequences == 0 {
                return (cache.kind(), Vec::new());
            }
            let tokens = |rows: usize, len: usize| {
                let ids: Vec<u32> = (0..(rows * len) as u32).map(|i| i % 9).collect();
                Tensor::from_vec(ids, (rows, len), &Device::Cpu).expect("ids")
            };
            model.step(&tokens(sequences, 2), &mut cache).expect("logits");
            let kept = [vec![0, 1, 3], vec![3, 0]].map(|rows| model.keep(&rows, &mut cache).expect("rows"));
            let logits = model.step(&tokens(2, 1), &mut cache).expect("logits");
            assert_eq!(logits.dims()[0], 2);
            (cache.kind(), kept.to_vec())
        })[..] else {
            panic!("one rank")
        };
        (*got, kept.clone())
    };
    assert_eq!(of("qwen3_moe", 4, CacheKind::Static), (CacheKind::Static, vec![false, true]));
    assert_eq!(of("qwen3_moe", 0, CacheKind::Static).0, CacheKind::Static);
    assert_eq!(of("qwen3_next", 4, CacheKind::Static), (CacheKind::Static, vec![false, true]));
}

/// Rotations that change with the length have a cache that grows, whatever was asked for.
#[test]
fn a_model_without_a_static_cache_has_one_that_grows() {
    let changing = Golden::all().into_iter().filter(|golden| golden.rotation() != Rotation::Fixed);
    let mut count = 0;
    for golden in changing {
        on_ranks(1, &golden, |_, group| {
            let model = golden.load(&group, golden.options());
            let request = CacheRequest { sequences: 1, prompt_tokens: 2, max_tokens: 9, kind: CacheKind::Static };
            assert_eq!(Decoder::cache(&model, request).expect("a cache").kind(), CacheKind::Growing);
        });
        count += 1;
    }
    // Another folder of folders may have none.
    assert!(count > 0 || std::env::var_os("MOEBIUS_GOLDEN").is_some(), "no folder with such rotations");
}

/// Sequences leave, come in another order and get more room, and what goes on has the logits of a forward.
#[test]
fn a_resized_stepper_goes_on() {
    for golden in Golden::all() {
        // Steps from the fourth token on, over another memory from the fifth and the sixth.
        if golden.rotation() != Rotation::Fixed || golden.ids().dim(1).expect("tokens") < 6 {
            continue;
        }
        on_ranks(1, &golden, |_, group| {
            let model = golden.load(&group, golden.options());
            resizing(&golden, &model, tolerance(&golden), false);
        });
    }
}

/// A folder of the repository with a context of its own.
fn with_context(name: &str, context: usize, to: &Path) {
    let from = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
    std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).expect("weights");
    let config = std::fs::read(from.join("config.json")).expect("a config");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    config["max_position_embeddings"] = context.into();
    std::fs::write(to.join("config.json"), config.to_string()).expect("a config");
}

/// A cache begins with room for 1024 tokens and moves where a text becomes longer.
#[test]
fn a_text_outgrows_the_room_that_a_static_cache_begins_with() {
    let folder = tempfile::tempdir().expect("a folder");
    with_context("qwen3_moe", 4096, folder.path());
    let model = Model::load(folder.path(), &Device::Cpu, LoadOptions::default()).expect("a model");
    let prompt: Vec<u32> = (0..500u32).map(|at| at * 31 % 97).collect();
    let run = |kind: CacheKind| {
        let generator = Generator::new(&model, None).expect("a generator").cache(kind);
        let mut left = 540;
        let requests = [Request::new(prompt.clone(), 3000), Request::new(prompt[1..].to_vec(), 3000)];
        let (outputs, _) = generator
            .run(&requests, |event| {
                left -= usize::from(event.request == 0);
                if left == 0 { ControlFlow::Break(EndOf::Run) } else { ControlFlow::Continue(()) }
            })
            .expect("outputs");
        outputs
    };
    let [fixed, growing] = KINDS.map(run);
    assert!(fixed[0].tokens.len() + prompt.len() > 1024, "past the first room");
    assert_eq!(fixed, growing);
}

/// The small model's texts, greedy and as its folder says.
#[test]
fn the_small_models_texts_are_the_same() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("small");
    let tokenizer = Tokenizer::from_folder(&folder).expect("its tokenizer");
    let options = LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() };
    let model = Model::load(&folder, &Device::Cpu, options).expect("the model");
    for sampling in [Sampling::default(), Sampling::from_folder(&folder).expect("its sampling")] {
        let request = |text: &str| Request {
            sampling,
            stop_tokens: tokenizer.eos().to_vec(),
            stop_strings: vec!["\n\n".into()],
            ..Request::new(tokenizer.encode_prompt(text).expect("ids"), 48)
        };
        let requests =
            ["A rank that fails", "The experts of", "Every rank loads its own part of a checkpoint,"].map(request);
        let [fixed, growing] = KINDS.map(|kind| {
            let generator = Generator::new(&model, Some(&tokenizer)).expect("a generator").cache(kind);
            generator.run(&requests, go).expect("outputs").0
        });
        assert_eq!(fixed, growing, "{sampling:?}");
        assert!(fixed.iter().any(|output| output.text.len() > 40), "{fixed:?}");
    }
}

/// Steps with room for any choices have the logits of those without, on ranks with one sequence, two, or none; which ranks
/// say what is told by errors, and a group without the room steps as before.
#[test]
fn steps_with_room_over_ranks_have_the_same_logits() {
    let golden = Golden::named("qwen3_moe");
    for ranks in [1, 2, 4] {
        on_ranks(ranks, &golden, |rank, group| {
            let model = golden.load(&group, golden.options());
            let own = [2, 1, 0, 1][rank];
            let prompt = match own {
                0 => Tensor::zeros((0, 1), DType::U32, &Device::Cpu),
                own => Tensor::from_vec((0..3 * own as u32).collect(), (own, 3), &Device::Cpu),
            };
            let prompt = prompt.expect("ids");
            let logits = |most: Option<usize>| {
                let mut stepper = model.stepper(own, 8).expect("a stepper");
                let mut all = vec![stepper.feed(&prompt).expect("logits")];
                if let Some(most) = most {
                    assert_eq!(stepper.capture_over_ranks(most).expect("as many as there are"), ranks > 1);
                }
                all.extend((0..4).map(|_| stepper.step().expect("logits").clone()));
                all.iter()
                    .flat_map(|t| t.flatten_all().expect("a row").to_vec1::<f32>().expect("f32"))
                    .collect::<Vec<_>>()
            };
            let expected = logits(None);
            assert_eq!(expected.len(), 5 * own * model.vocabulary());
            assert_eq!(logits(Some(2)), expected, "rank {rank} of {ranks}");
            assert_eq!(logits(Some(5)), expected, "rank {rank} of {ranks}");
            let mut stepper = model.stepper(2, 8).expect("a stepper");
            let error = stepper.capture_over_ranks(1).expect_err("two sequences here").to_string();
            assert!(error.contains("this one has 2"), "{error}");
            // As many as the group has no room for.
            assert!(!stepper.capture_over_ranks(1 << 20).expect("too many are no error"));
        });
    }
}

/// Ranks of one and of two sequences that are not asked for their plans, but step as often as each other.
#[test]
fn ranks_that_do_not_meet_run_their_steps_as_prompts() {
    let golden = Golden::named("qwen3_moe");
    let requests = requests(97);
    on_ranks(2, &golden, |rank, group| {
        let model = golden.load(&group, golden.options());
        let own: Vec<Request> =
            (0..1 + rank).map(|i| Request::new(requests[i].prompt[..1 + 2 * rank].to_vec(), 5)).collect();
        let run =
            |kind| Generator::new(&model, None).expect("a generator").cache(kind).run(&own, go).expect("outputs").0;
        assert_eq!(run(CacheKind::Static), run(CacheKind::Growing), "rank {rank}");
    });
}
