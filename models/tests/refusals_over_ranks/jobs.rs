//! What a rank does from a folder: loads its model and runs it, or converses.

use std::error::Error as StdError;
use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{Device, Tensor};
use moebius::candle::EpGroup;
use moebius::checkpoint::Checkpoint;
use moebius::cpu::{Cpu, ThreadComm};
use moebius::ep::{Group, GroupConfig};
use moebius_models::generate::{Chat, ChatTemplate, Generator, OverRanks, Request, Tokenizer};
use moebius_models::{LoadOptions, Model};

type AnyError = Box<dyn StdError + Send + Sync>;
pub type Outcome = Result<(), AnyError>;

pub const TOKENS: usize = 64;

/// What a rank reaches the other by: for the experts, and between a decoder's steps.
pub struct Link {
    pub experts: ThreadComm,
    pub steps: ThreadComm,
}

/// A rank's model, whose group is one of the folder's own number of experts.
pub fn load(dir: &Path, experts: ThreadComm) -> Result<Model, AnyError> {
    let checkpoint = Checkpoint::open(dir)?;
    let layer = *checkpoint.moe_layers().first().ok_or("no experts")?;
    let config = GroupConfig::new(checkpoint.block_config(layer)?.router.num_experts, TOKENS);
    let group = EpGroup::new(Group::new(Cpu::new(), Box::new(experts), config)?);
    Ok(Model::load_on(&checkpoint, group, LoadOptions::default())?)
}

pub fn forward(model: &Model, ids: &[u32], dims: &[usize]) -> Outcome {
    let ids = Tensor::from_slice(ids, dims, &Device::Cpu)?;
    model.forward(&ids)?;
    Ok(())
}

pub fn loads_and_runs(dir: &Path, link: Link, _: bool) -> Outcome {
    let model = load(dir, link.experts)?;
    forward(&model, &[3, 14, 15], &[1, 3])?;
    let ids = Tensor::new(&[[9u32]], &Device::Cpu)?;
    let mut cache = model.cache();
    model.decode(&ids, &mut cache)?;
    model.loss(&ids)?;
    Ok(())
}

/// As a program converses: of a message, or of the given ids.
pub fn converses(dir: &Path, link: Link, request: impl FnOnce(Vec<u32>) -> Request) -> Outcome {
    let tokenizer = Tokenizer::from_folder(dir)?;
    let template = ChatTemplate::from_folder(dir)?;
    let model = load(dir, link.experts)?;
    let generator = Generator::new(OverRanks::new(&model, Box::new(link.steps)), Some(&tokenizer))?;
    let prompt = tokenizer.encode_chat(&template, &Chat::new().say("user", "hi").generation_prompt(true))?;
    generator.run(&[request(prompt)], |_| ControlFlow::Continue(()))?;
    Ok(())
}

pub fn talks(dir: &Path, link: Link, _: bool) -> Outcome {
    converses(dir, link, |prompt| Request::new(prompt, 4))
}
