//! Generation with the decoder of the golden folder, as a library and as the program of `examples/generate`.

mod errors;
mod runs;
mod texts;

use std::ops::ControlFlow;
use std::path::Path;
use std::process::Output;
use std::thread;
use std::time::Duration;

use candle_core::{Device, IndexOp, Tensor};
use moebius::candle::EpGroup;
use moebius::checkpoint::{Checkpoint, Form};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius_models::generate::{Chat, ChatTemplate, EndOf, Event, Generator, OverRanks, Request, Tokenizer};
use moebius_models::{ExpertWeights, LoadOptions, Model};

#[path = "../support/chat_folder.rs"]
mod chat_folder;
#[path = "../support/program.rs"]
mod program;

use chat_folder::{chat_folder, golden_folder, tokenizer_json};
use program::text;

fn load(group: EpGroup) -> Model {
    let checkpoint = Checkpoint::open(golden_folder()).expect("a checkpoint");
    Model::load_on(&checkpoint, group, LoadOptions::default()).expect("a model")
}

/// Prompts of several lengths within the vocabulary of 97.
fn requests() -> Vec<Request> {
    [3usize, 9, 1, 5, 9]
        .into_iter()
        .enumerate()
        .map(|(i, len)| Request::new((0..len as u32).map(|at| (at * 13 + 7 * i as u32) % 97).collect(), 4 + 3 * i))
        .collect()
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    program::run(&[&[folder.to_str().expect("a path")], arguments].concat())
}

/// Greedy continuation by whole forwards, without a cache. A step's best logit is ahead of the second by more than two
/// ways to sum the same numbers can differ: logits are of size 1, and agree to a few 1e-6 (`tests/golden.rs`).
fn expected(model: &Model, request: &Request) -> Vec<u32> {
    let mut ids = request.prompt.clone();
    for _ in 0..request.max_tokens {
        let input = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).expect("ids");
        let logits = model.forward(&input).expect("logits").i((0, ids.len() - 1)).expect("the last row");
        let logits = logits.to_vec1::<f32>().expect("values");
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        assert!(logits[order[0]] - logits[order[1]] > 5e-5, "a tie, which any rounding decides: choose other prompts");
        ids.push(order[0] as u32);
    }
    ids.split_off(request.prompt.len())
}

fn error(status: i32, output: &Output) -> String {
    assert_eq!(output.status.code(), Some(status), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.is_empty());
    let text = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert!(text.starts_with("error: ") && text.lines().count() == 1, "{text}");
    text
}
