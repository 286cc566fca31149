//! Models whose experts are on the host against the same models with all experts at hand: the same bits.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{DType, Device, Tensor};
use moebius::candle::Parameters;
use moebius::cpu::Cpu;
use moebius_models::{Error, ExpertWeights, LoadOptions, Model, Point};

use support::{Golden, on_ranks};

fn bits(t: &Tensor) -> Vec<u64> {
    let values = t.to_dtype(DType::F64).and_then(|t| t.flatten_all()?.to_vec1::<f64>()).expect("values");
    values.into_iter().map(f64::to_bits).collect()
}

/// Folders of several layers with experts, and the forms in which these are held.
fn cases() -> Vec<(Golden, LoadOptions)> {
    let stored = ["qwen3_moe_nvfp4_modelopt", "qwen3_moe_nvfp4_ct", "gpt_oss_mxfp4", "deepseek_v3_fp8"];
    let floats = ["qwen3_moe", "qwen3_moe_bf16", "gpt_oss", "qwen3_next"];
    let mut cases = Vec::new();
    for (names, experts) in [
        (&stored[..], ExpertWeights::AsStored),
        (&stored, ExpertWeights::Dequantized),
        (&floats, ExpertWeights::Dequantized),
        (&["qwen3_moe", "qwen3_moe_nvfp4_modelopt"], ExpertWeights::Nvfp4),
    ] {
        for name in names {
            let golden = Golden::named(name);
            let options = LoadOptions { experts, ..golden.options() };
            cases.push((golden, options));
        }
    }
    let random = Golden::named("qwen3_moe");
    let options = LoadOptions { random: Some(3), experts: ExpertWeights::Nvfp4, ..random.options() };
    cases.push((random, options));
    cases
}

/// A prefill, steps behind it, and steps over a static cache.
fn decoded(model: &Model, ids: &Tensor) -> Vec<Vec<u64>> {
    let (first, len) = (3, ids.dim(1).expect("tokens").min(6));
    let part = |from: usize, count: usize| ids.narrow(1, from, count).expect("a part");
    let mut cache = model.cache();
    let mut all = vec![bits(&model.decode(&part(0, first), &mut cache).expect("logits"))];
    for at in first..len {
        all.push(bits(&model.decode(&part(at, 1), &mut cache).expect("logits")));
    }
    let mut stepper = model.stepper(ids.dim(0).expect("sequences"), len).expect("a stepper");
    all.push(bits(&stepper.feed(&part(0, first)).expect("logits")));
    for at in first..len {
        let next: Vec<u32> =
            part(at, 1).flatten_all().expect("ids").to_dtype(DType::U32).expect("ids").to_vec1().expect("ids");
        stepper.set_next_ids(&next).expect("ids");
        all.push(bits(stepper.step().expect("logits")));
    }
    all
}

#[test]
fn results_are_those_of_experts_at_hand() {
    for (golden, options) in cases() {
        let name = format!("{} {:?}, {:?}", golden.name, options.experts, options.random);
        on_ranks(1, &golden, |_, group| {
            let expected = golden.load(&group, options);
            let model = golden.load(&group, LoadOptions { experts_on_host: true, ..options });
            let logits = bits(&expected.forward(golden.ids()).expect("logits"));
            // The first forward shows the order of the layers, the others have their experts sent ahead.
            for pass in 0..3 {
                assert!(bits(&model.forward(golden.ids()).expect("logits")) == logits, "{name}, forward {pass}");
            }
            assert!(decoded(&model, golden.ids()) == decoded(&expected, golden.ids()), "{name}");
            let host = model.host_experts().expect("experts on the host");
            assert!(expected.host_experts().is_none() && host.bytes() > 0, "{name}");
            // All experts come once a forward, and of two layers there is memory.
            let (chain, layers) = (host.on::<Cpu>().expect("a CPU"), golden.checkpoint.moe_layers().len());
            let before = chain.traffic();
            model.forward(golden.ids()).expect("logits");
            let moved = chain.traffic().gathered_bytes - before.gathered_bytes;
            assert_eq!((moved as usize, chain.traffic().allocations), (host.bytes(), before.allocations), "{name}");
            assert!(chain.memory().gathered * layers <= 2 * host.bytes(), "{name}: {:?}", chain.memory());
        });
    }
}

/// A failure in the middle of a forward, of the first one too: the next forward has the same bits.
#[test]
fn a_forward_behind_one_that_failed() {
    for name in ["qwen3_moe", "qwen3_moe_nvfp4_modelopt"] {
        let golden = Golden::named(name);
        let last = *golden.checkpoint.moe_layers().last().expect("a layer");
        assert!(last > 0, "{name}: a layer before the last");
        on_ranks(1, &golden, |_, group| {
            let options = LoadOptions { experts: ExpertWeights::AsStored, ..golden.options() };
            let expected = bits(&golden.load(&group, options).forward(golden.ids()).expect("logits"));
            let model = golden.load(&group, LoadOptions { experts_on_host: true, ..options });
            let fail = |at: Point| {
                let mut tap = |point: Point, t: Tensor| match point == at {
                    true => Err(candle_core::Error::Msg("out of luck".into())),
                    false => Ok(t),
                };
                let error = model.forward_tapped(golden.ids(), &mut tap).expect_err("the tap's");
                assert!(error.to_string().contains("out of luck"), "{error}");
            };
            for at in [
                Point::MoeInput { layer: 0 },
                Point::MoeOutput { layer: last },
                Point::MoeInput { layer: last },
                Point::MoeOutput { layer: 0 },
            ] {
                fail(at);
                fail(at);
                assert!(bits(&model.forward(golden.ids()).expect("logits")) == expected, "{name} behind {at:?}");
                assert!(bits(&model.forward(golden.ids()).expect("logits")) == expected, "{name} behind {at:?}, again");
            }
            let panics = || {
                let mut tap = |_: Point, _: Tensor| panic!("out of luck");
                drop(model.forward_tapped(golden.ids(), &mut tap));
            };
            catch_unwind(AssertUnwindSafe(panics)).expect_err("a panic");
            assert!(bits(&model.forward(golden.ids()).expect("logits")) == expected, "{name} behind a panic");
            // What is refused before any layer.
            model.forward(&Tensor::zeros((1, 0), DType::U32, &Device::Cpu).expect("ids")).expect_err("an empty prompt");
            assert!(bits(&model.forward(golden.ids()).expect("logits")) == expected, "{name} behind a refusal");
        });
    }
}

/// Each rank has its experts on its host; a rank that fails is told to the others, and all go on.
#[test]
fn ranks_have_their_experts_on_their_hosts() {
    let golden = Golden::named("qwen3_moe_nvfp4_modelopt");
    for split in golden.splits() {
        let shares = golden.shares(&split);
        let ranks = split.len();
        on_ranks(ranks, &golden, |rank, group| {
            let options = LoadOptions { experts: ExpertWeights::AsStored, ..golden.options() };
            let expected = bits(&golden.load(&group, options).forward(&shares[rank]).expect("logits"));
            let model = golden.load(&group, LoadOptions { experts_on_host: true, ..options });
            for pass in 0..3 {
                let found = bits(&model.forward(&shares[rank]).expect("logits"));
                assert!(found == expected, "{split:?}, rank {rank}, forward {pass}");
                let wrong = Tensor::full(97u32, (1, 1), &Device::Cpu).expect("ids");
                let last = rank + 1 == ranks;
                model.forward(if last { &wrong } else { &shares[rank] }).expect_err("a failure on the last rank");
            }
        });
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let golden = Golden::named("qwen3_moe");
    on_ranks(1, &golden, |_, group| {
        let on_host = LoadOptions { experts_on_host: true, ..golden.options() };
        let options = LoadOptions { parameters: Parameters::Trainable, ..on_host };
        let error = Model::load_on(&golden.checkpoint, &group, options).expect_err("trainable");
        assert!(matches!(&error, Error::Usage { problem, .. } if problem.contains("experts_on_host")), "{error:?}");
        // One forward at a time: not one within another.
        let model = golden.load(&group, on_host);
        let mut inner = None;
        let mut tap = |_: Point, t: Tensor| {
            inner = Some(model.forward(golden.ids()).expect_err("a forward within a forward").to_string());
            Ok(t)
        };
        model.forward_tapped(golden.ids(), &mut tap).expect("logits");
        assert!(inner.is_some_and(|error| error.contains("one at a time")));
        model.forward(golden.ids()).expect("logits");
    });
}
