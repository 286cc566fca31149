//! Bad input over two ranks, on one of them or on both: a typed error on every rank, told and not timed out.

#[path = "support/chat_folder.rs"]
mod chat_folder;

use std::collections::HashMap;
use std::error::Error as StdError;
use std::ops::ControlFlow;
use std::path::Path;
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use moebius::candle::{EpGroup, error_of};
use moebius::checkpoint::Checkpoint;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::{CommError, Error as LayerError};
use moebius_models::generate::{Chat, ChatTemplate, Error as TextError, Generator, OverRanks, Request, Tokenizer};
use moebius_models::{Error, LoadOptions, Model};
use serde_json::{Value, json};
use tempfile::TempDir;

use chat_folder::{chat_folder, tokenizer_json};

type AnyError = Box<dyn StdError + Send + Sync>;
type Outcome = Result<(), AnyError>;

/// Longer than any case takes: what ends by it was waited for.
const TIMEOUT: Duration = Duration::from_secs(120);
const RANKS: usize = 2;
const TOKENS: usize = 64;
/// Ranks that have it wrong.
const EVERYWHERE_OR_ON_ONE: [[bool; RANKS]; 3] = [[true, true], [true, false], [false, true]];

/// What a rank reaches the other by: for the experts, and between a decoder's steps.
struct Link {
    experts: ThreadComm,
    steps: ThreadComm,
}

/// What is wrong.
struct Case {
    name: &'static str,
    /// Makes the folder wrong, on the ranks that have it so.
    spoil: fn(&Path),
    /// What a rank does, from a folder; `true` where it is to do it wrongly.
    job: fn(&Path, Link, bool) -> Outcome,
    /// What the error of a rank names that finds the fault by itself.
    words: &'static str,
    /// Both ranks find it by themselves, though it is wrong on one alone: by comparing what they have.
    compared: bool,
}

fn nothing(_: &Path) {}

fn change_config(dir: &Path, change: impl FnOnce(&mut Value)) {
    let file = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).expect("a config")).expect("JSON");
    change(&mut config);
    std::fs::write(file, config.to_string()).expect("a config");
}

fn change_tensors(dir: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let file = dir.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("weights");
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, file).expect("weights");
}

fn template(dir: &Path, text: &str) {
    std::fs::write(dir.join("chat_template.jinja"), text).expect("a template");
}

/// A rank's model, whose group is one of the folder's own number of experts.
fn load(dir: &Path, experts: ThreadComm) -> Result<Model, AnyError> {
    let checkpoint = Checkpoint::open(dir)?;
    let layer = *checkpoint.moe_layers().first().ok_or("no experts")?;
    let config = GroupConfig::new(checkpoint.block_config(layer)?.router.num_experts, TOKENS);
    let group = EpGroup::new(Group::new(Cpu::new(), Box::new(experts), config)?);
    Ok(Model::load_on(&checkpoint, group, LoadOptions::default())?)
}

fn forward(model: &Model, ids: &[u32], dims: &[usize]) -> Outcome {
    let ids = Tensor::from_slice(ids, dims, &Device::Cpu)?;
    model.forward(&ids)?;
    Ok(())
}

fn loads_and_runs(dir: &Path, link: Link, _: bool) -> Outcome {
    let model = load(dir, link.experts)?;
    forward(&model, &[3, 14, 15], &[1, 3])?;
    let ids = Tensor::new(&[[9u32]], &Device::Cpu)?;
    let mut cache = model.cache();
    model.decode(&ids, &mut cache)?;
    model.loss(&ids)?;
    Ok(())
}

/// A first call that is right, and one that is not.
fn calls(dir: &Path, link: Link, call: impl FnOnce(&Model) -> Outcome, wrong: bool) -> Outcome {
    let model = load(dir, link.experts)?;
    forward(&model, &[3, 14, 15], &[1, 3])?;
    match wrong {
        true => call(&model),
        false => forward(&model, &[9], &[1, 1]),
    }
}

/// As a program converses: of a message, or of the given ids.
fn converses(dir: &Path, link: Link, request: impl FnOnce(Vec<u32>) -> Request) -> Outcome {
    let tokenizer = Tokenizer::from_folder(dir)?;
    let template = ChatTemplate::from_folder(dir)?;
    let model = load(dir, link.experts)?;
    let generator = Generator::new(OverRanks::new(&model, Box::new(link.steps)), Some(&tokenizer))?;
    let prompt = tokenizer.encode_chat(&template, &Chat::new().say("user", "hi").generation_prompt(true))?;
    generator.run(&[request(prompt)], |_| ControlFlow::Continue(()))?;
    Ok(())
}

fn talks(dir: &Path, link: Link, _: bool) -> Outcome {
    converses(dir, link, |prompt| Request::new(prompt, 4))
}

fn asks(dir: &Path, link: Link, wrong: bool, ask: impl FnOnce(&mut Request)) -> Outcome {
    converses(dir, link, |prompt| {
        let mut request = Request::new(prompt, 4);
        if wrong {
            ask(&mut request);
        }
        request
    })
}

impl Case {
    /// Of a folder that is loaded, or not.
    const fn of_folder(name: &'static str, spoil: fn(&Path), words: &'static str) -> Self {
        Self { name, spoil, job: loads_and_runs, words, compared: false }
    }

    /// Of folders that are right by themselves.
    const fn of_two_folders(name: &'static str, spoil: fn(&Path), words: &'static str) -> Self {
        Self { compared: true, ..Self::of_folder(name, spoil, words) }
    }

    const fn of_call(name: &'static str, job: fn(&Path, Link, bool) -> Outcome, words: &'static str) -> Self {
        Self { name, spoil: nothing, job, words, compared: false }
    }

    const fn of_texts(name: &'static str, spoil: fn(&Path), words: &'static str) -> Self {
        Self { name, spoil, job: talks, words, compared: false }
    }

    /// What becomes of the ranks where these have it wrong.
    fn outcomes(&self, wrong: [bool; RANKS]) -> Vec<Outcome> {
        let folders: Vec<TempDir> = wrong.iter().map(|_| chat_folder(&tokenizer_json(false))).collect();
        let spoiled = folders.iter().zip(wrong).filter(|(_, wrong)| *wrong);
        spoiled.for_each(|(folder, _)| (self.spoil)(folder.path()));
        let worlds = ThreadWorld::create(RANKS, TIMEOUT).into_iter().zip(ThreadWorld::create(RANKS, TIMEOUT));
        thread::scope(|scope| {
            let threads: Vec<_> = worlds
                .zip(folders.iter().zip(wrong))
                .map(|((experts, steps), (folder, wrong))| {
                    scope.spawn(move || (self.job)(folder.path(), Link { experts, steps }, wrong))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| panic!("{}: panicked", self.name)))
                .collect()
        })
    }

    fn hold(&self, wrong: [bool; RANKS]) {
        for (rank, outcome) in self.outcomes(wrong).into_iter().enumerate() {
            let at = format!("{}, wrong on {wrong:?}, rank {rank}", self.name);
            let Err(error) = outcome else { panic!("{at}: no error") };
            let (text, own) = (error.to_string(), wrong[rank] || self.compared);
            assert!(is_typed(&*error), "{at}: {error:?}");
            assert!(!is_late(&*error), "{at}: timed out: {text}");
            assert!(!own || text.contains(self.words), "{at}: {text}");
            assert!(own || is_told(&*error), "{at}: {error:?}");
            assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{at}: {text:?}");
        }
    }
}

/// An error of this crate's or of the layer's, and no text alone.
fn is_typed(error: &(dyn StdError + 'static)) -> bool {
    error.is::<Error>() || error.is::<TextError>() || error.is::<LayerError>()
}

fn of_layer<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a LayerError> {
    match error.downcast_ref() {
        Some(TextError::Model(Error::Moebius(error))) => return Some(error),
        Some(TextError::Model(Error::Candle(error)) | TextError::Candle(error)) => return error_of(error),
        _ => {}
    }
    match error.downcast_ref() {
        Some(Error::Moebius(error)) => Some(error),
        Some(Error::Candle(error)) => error_of(error),
        _ => error_of(error),
    }
}

/// What a rank has of another one's failure.
fn is_told(error: &(dyn StdError + 'static)) -> bool {
    use CommError::{PeerGone, Refused};
    matches!(of_layer(error), Some(LayerError::Peer { .. } | LayerError::Comm(PeerGone { .. } | Refused { .. })))
}

fn is_late(error: &(dyn StdError + 'static)) -> bool {
    matches!(of_layer(error), Some(LayerError::Comm(CommError::Timeout { .. } | CommError::Poisoned { .. })))
}

#[test]
fn folders_that_cannot_be() {
    const Q_PROJ: &str = "model.layers.1.self_attn.q_proj.weight";
    const EXPERT: &str = "model.layers.1.mlp.experts.6.down_proj.weight";
    for case in [
        Case::of_folder("nobody's family", |dir| change_config(dir, |c| c["model_type"] = "nobody".into()), "nobody"),
        Case::of_folder(
            "a family without a decoder",
            |dir| change_config(dir, |c| c["model_type"] = "jamba".into()),
            "",
        ),
        Case::of_folder(
            "no config.json",
            |dir| std::fs::remove_file(dir.join("config.json")).expect("gone"),
            "config.json",
        ),
        Case::of_folder("no JSON", |dir| std::fs::write(dir.join("config.json"), "{").expect("a file"), "config.json"),
        Case::of_folder(
            "no weights",
            |dir| std::fs::remove_file(dir.join("model.safetensors")).expect("gone"),
            "safetensors",
        ),
        Case::of_folder(
            "weights that are cut off",
            |dir| {
                let file = dir.join("model.safetensors");
                let bytes = std::fs::read(&file).expect("weights");
                std::fs::write(file, &bytes[..bytes.len() / 2]).expect("weights");
            },
            "model.safetensors",
        ),
        Case::of_folder("a missing matrix", |dir| change_tensors(dir, |t| drop(t.remove(Q_PROJ))), Q_PROJ),
        Case::of_folder("a missing expert", |dir| change_tensors(dir, |t| drop(t.remove(EXPERT))), EXPERT),
        Case::of_folder("a mis-shaped matrix", |dir| change_tensors(dir, |t| shorten(t, Q_PROJ)), Q_PROJ),
        Case::of_folder("a mis-shaped expert", |dir| change_tensors(dir, |t| shorten(t, EXPERT)), EXPERT),
        Case::of_folder(
            "a layer too many",
            |dir| change_config(dir, |c| c["num_hidden_layers"] = 3.into()),
            "layers.2.",
        ),
        Case::of_folder("a size that is none", |dir| change_config(dir, |c| c["head_dim"] = 0.into()), "head_dim"),
    ] {
        EVERYWHERE_OR_ON_ONE.iter().for_each(|wrong| case.hold(*wrong));
    }
}

fn shorten(tensors: &mut HashMap<String, Tensor>, name: &str) {
    let tensor = tensors.remove(name).expect("a tensor of this name");
    let rows = tensor.dim(0).expect("rows");
    tensors.insert(name.into(), tensor.narrow(0, 0, rows - 1).and_then(|t| t.contiguous()).expect("rows"));
}

/// Ranks whose folders differ would wait for layers that one of them has not, or go on to logits of two models.
#[test]
fn folders_that_are_not_each_others() {
    for case in [
        Case::of_two_folders(
            "fewer layers",
            |dir| change_config(dir, |c| c["num_hidden_layers"] = 1.into()),
            "num_hidden_layers differs",
        ),
        Case::of_two_folders(
            "other rotations",
            |dir| change_config(dir, |c| c["rope_parameters"]["rope_theta"] = json!(1e6)),
            "rope_parameters.rope_theta differs",
        ),
        Case::of_two_folders(
            "another norm",
            |dir| change_config(dir, |c| c["rms_norm_eps"] = json!(1e-5)),
            "rms_norm_eps differs",
        ),
        Case::of_two_folders(
            "a shorter context",
            |dir| change_config(dir, |c| c["max_position_embeddings"] = 128.into()),
            "max_position_embeddings differs",
        ),
        Case::of_two_folders(
            "fewer choices",
            |dir| change_config(dir, |c| c["num_experts_per_tok"] = 2.into()),
            "num_experts_per_tok differs",
        ),
        Case::of_two_folders(
            "a layer without experts",
            |dir| {
                change_config(dir, |c| c["mlp_only_layers"] = json!([1]));
                change_tensors(dir, |t| {
                    t.retain(|name, _| !name.starts_with("model.layers.1.mlp."));
                    for (name, dims) in [("gate", [56, 64]), ("up", [56, 64]), ("down", [64, 56])] {
                        let weight = Tensor::zeros(&dims, DType::F32, &Device::Cpu).expect("a weight");
                        t.insert(format!("model.layers.1.mlp.{name}_proj.weight"), weight);
                    }
                });
            },
            "mlp_only_layers differs",
        ),
        Case::of_two_folders(
            "another type",
            |dir| {
                change_tensors(dir, |t| {
                    t.values_mut().for_each(|t| *t = t.to_dtype(DType::BF16).expect("bf16"));
                });
            },
            "type of the embedding differs",
        ),
        // The group finds this one.
        Case::of_two_folders(
            "fewer experts",
            |dir| {
                change_config(dir, |c| c["num_local_experts"] = 4.into());
                change_tensors(dir, |t| {
                    t.retain(|name, _| !["4", "5", "6", "7"].iter().any(|e| name.contains(&format!(".experts.{e}."))));
                    for layer in [0, 1] {
                        let name = format!("model.layers.{layer}.mlp.gate.weight");
                        let gate = t[&name].narrow(0, 0, 4).and_then(|t| t.contiguous()).expect("four rows");
                        t.insert(name, gate);
                    }
                });
            },
            "num_experts differs",
        ),
    ] {
        EVERYWHERE_OR_ON_ONE[1..].iter().for_each(|wrong| case.hold(*wrong));
    }
}

/// Alike for all but what says where a folder came from.
#[test]
fn folders_of_another_origin_are_alike() {
    let other = |dir: &Path| {
        change_config(dir, |c| {
            c["_name_or_path"] = "elsewhere".into();
            c["transformers_version"] = "4.0".into();
        });
    };
    let case = Case::of_folder("another origin", other, "");
    assert!(case.outcomes([true, false]).iter().all(Result::is_ok));
    let case = Case::of_texts("another origin", other, "");
    assert!(case.outcomes([false, true]).iter().all(Result::is_ok));
}

#[test]
fn calls_that_cannot_be() {
    for case in [
        Case::of_call(
            "tokens past the context",
            |dir, link, wrong| calls(dir, link, |model| forward(model, &[1; 257], &[1, 257]), wrong),
            "257 new tokens; the context is 256",
        ),
        Case::of_call(
            "tokens past the group's most",
            |dir, link, wrong| calls(dir, link, |model| forward(model, &[1; 65], &[1, 65]), wrong),
            "65",
        ),
        Case::of_call(
            "cached tokens past the context",
            |dir, link, wrong| {
                let model = load(dir, link.experts)?;
                let mut cache = model.cache();
                for _piece in 0..4 {
                    model.decode(&Tensor::ones((1, TOKENS), DType::U32, &Device::Cpu)?, &mut cache)?;
                }
                if !wrong {
                    cache.clear();
                }
                model.decode(&Tensor::ones((1, 1), DType::U32, &Device::Cpu)?, &mut cache)?;
                Ok(())
            },
            "256 cached and 1 new tokens",
        ),
        Case::of_call(
            "an empty prompt",
            |dir, link, wrong| calls(dir, link, |model| forward(model, &[], &[1, 0]), wrong),
            "empty prompt",
        ),
        Case::of_call(
            "an id past the embedding",
            |dir, link, wrong| calls(dir, link, |model| forward(model, &[3, 97], &[1, 2]), wrong),
            "position 1: expected an id in 0..97, found 97",
        ),
        Case::of_call(
            "ids of one dimension",
            |dir, link, wrong| calls(dir, link, |model| forward(model, &[3, 9], &[2]), wrong),
            "expected shape [B, S], found [2]",
        ),
        Case::of_call(
            "ids that are no integers",
            |dir, link, wrong| {
                let floats = |model: &Model| {
                    model.forward(&Tensor::zeros((1, 2), DType::F32, &Device::Cpu)?)?;
                    Ok(())
                };
                calls(dir, link, floats, wrong)
            },
            "expected integers",
        ),
        Case::of_call(
            "an id past the embedding that a loss is of",
            |dir, link, wrong| {
                let loss = |model: &Model| {
                    model.loss(&Tensor::new(&[[3i64, -1]], &Device::Cpu)?)?;
                    Ok(())
                };
                calls(dir, link, loss, wrong)
            },
            "found -1",
        ),
        Case::of_call(
            "a stepper without room",
            |dir, link, wrong| {
                let model = load(dir, link.experts)?;
                let mut stepper = model.stepper(1, if wrong { 3 } else { 4 })?;
                stepper.feed(&Tensor::new(&[[3u32, 14, 15]], &Device::Cpu)?)?;
                stepper.step()?;
                Ok(())
            },
            "room for 3",
        ),
    ] {
        EVERYWHERE_OR_ON_ONE.iter().for_each(|wrong| case.hold(*wrong));
    }
}

#[test]
fn texts_that_cannot_be() {
    const END: &str = "{{ messages[0].content }}";
    for case in [
        Case::of_texts(
            "a tokenizer whose ids exceed the embedding",
            |dir| std::fs::write(dir.join("tokenizer.json"), tokenizer_json(true)).expect("a file"),
            "token \"ab\" has id 97; the embedding has 97 rows",
        ),
        Case::of_texts(
            "a tokenizer that is none",
            |dir| std::fs::write(dir.join("tokenizer.json"), "{}").expect("a file"),
            "tokenizer.json",
        ),
        Case::of_texts(
            "no tokenizer",
            |dir| std::fs::remove_file(dir.join("tokenizer.json")).expect("gone"),
            "tokenizer.json",
        ),
        Case::of_texts("a template that does not compile", |dir| template(dir, "{% if"), "chat template"),
        Case::of_texts("a template that fails", |dir| template(dir, "{{ nobody.name }}"), "chat template"),
        Case::of_texts("a template that refuses", |dir| template(dir, "{{ raise_exception('not so') }}"), "not so"),
        Case::of_texts(
            "a template without end",
            |dir| {
                template(dir, "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}")
            },
            "chat template",
        ),
        Case::of_texts(
            "a template of nothing",
            |dir| template(dir, "{% if false %}x{% endif %}"),
            "the prompt has no token",
        ),
        Case::of_texts(
            "a template that fills the context",
            |dir| template(dir, &"x".repeat(256)),
            "the prompt has 256 tokens, the decoder's context 256",
        ),
        Case::of_call(
            "an id past the embedding",
            |dir, link, wrong| asks(dir, link, wrong, |request| request.prompt = vec![3, 97]),
            "id 97 at position 1 of the prompt",
        ),
        Case::of_call(
            "no token of a prompt",
            |dir, link, wrong| asks(dir, link, wrong, |request| request.prompt.clear()),
            "the prompt has no token",
        ),
        Case::of_call(
            "no token to generate",
            |dir, link, wrong| asks(dir, link, wrong, |request| request.max_tokens = 0),
            "max_tokens: expected 1 at least",
        ),
        Case::of_call(
            "a temperature below 0",
            |dir, link, wrong| asks(dir, link, wrong, |request| request.sampling.temperature = -1.0),
            "temperature",
        ),
        Case::of_texts(
            "logits that are no numbers",
            |dir| {
                template(dir, END);
                change_tensors(dir, |t| {
                    let nan = Tensor::full(f32::NAN, (97, 64), &Device::Cpu).expect("a matrix");
                    t.insert("lm_head.weight".into(), nan);
                });
            },
            "logits of a step",
        ),
    ] {
        EVERYWHERE_OR_ON_ONE.iter().for_each(|wrong| case.hold(*wrong));
    }
}
