//! Calls of a model that cannot be.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use moebius_models::Model;

use crate::case::{Case, EVERYWHERE_OR_ON_ONE};
use crate::jobs::{Link, Outcome, TOKENS, forward, load};

/// A first call that is right, and one that is not.
fn calls(dir: &Path, link: Link, call: impl FnOnce(&Model) -> Outcome, wrong: bool) -> Outcome {
    let model = load(dir, link.experts)?;
    forward(&model, &[3, 14, 15], &[1, 3])?;
    match wrong {
        true => call(&model),
        false => forward(&model, &[9], &[1, 1]),
    }
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
