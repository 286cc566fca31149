//! Conduct that a user of burn expects of any module: `init` on a device, a display, a configuration, loading.

use burn::backend::{Autodiff, Flex};
use burn::config::Config;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use moebius::burn::{DeviceGroup, ExpertParallelMoE, ExpertParallelMoEConfig, LoadAs};
use moebius::checkpoint::{Checkpoint, LoadOptions};
use moebius::config::AuxConfig;
use moebius::layer::Noise;
use moebius::{CommError, Error, MoeConfig};

use super::support::*;
use crate::goldens::golden_of;
use crate::trials::tests;

fn a_configuration_makes_a_layer_of_any_number_of_tokens() {
    let _alone = generator();
    let config = ExpertParallelMoEConfig::new(config());
    let moe = config.init::<B>(&device()).unwrap();
    assert_eq!((moe.group().ranks(), moe.layer().number()), (1, 0));
    let x = tensor::<B, 2>(values(1, 3000 * H, 1.0), [3000, H]).require_grad();
    let gradients = moe.forward(x.clone()).unwrap().powi_scalar(2).mean().backward();
    assert!(x.grad(&gradients).is_some() && moe.experts.up.grad(&gradients).is_some());
    let wrong = ExpertParallelMoEConfig::new(MoeConfig::new(H, I, E, E + 1)).init::<Flex>(&device());
    assert!(matches!(wrong, Err(Error::Invalid { ref name, .. }) if name == "top_k"), "{wrong:?}");
}

fn layers_are_numbered_in_the_order_of_their_making() {
    let _alone = generator();
    let group = DeviceGroup::single::<Flex>(&config(), &device()).unwrap();
    let config = ExpertParallelMoEConfig::new(config());
    let number = |config: &ExpertParallelMoEConfig| config.init_on::<Flex>(&group, &device()).unwrap().layer().number();
    assert_eq!((number(&config), number(&config)), (0, 1));
    assert_eq!(number(&config.clone().with_number(Some(7))), 7);
    assert_eq!(number(&config), 8);
}

/// The other rank hears of it at once, and both number their next layer alike.
fn a_layer_that_one_rank_cannot_make_fails_on_both() {
    let _alone = generator();
    let outcomes = on_ranks(2, LONG, |rank, group| {
        let moe = if rank == 1 { MoeConfig::new(H, I, E, E + 1) } else { config() };
        let error = ExpertParallelMoEConfig::new(moe).init_on::<Flex>(&group, &device()).err();
        let next = ExpertParallelMoEConfig::new(config()).init_on::<Flex>(&group, &device()).unwrap();
        (error, next.layer().number())
    });
    match &outcomes[..] {
        [
            (Some(Error::Comm(CommError::Refused { peer: 1, reason, .. })), 1),
            (Some(Error::Invalid { name, .. }), 1),
        ] => {
            assert!(name == "top_k" && reason.contains("top_k"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

fn a_module_shows_its_sizes() {
    let _alone = generator();
    let moe = ExpertParallelMoEConfig::new(config()).init::<Flex>(&device()).unwrap();
    let shown = moe.to_string();
    for part in ["ExpertParallelMoE", "hidden: 12", "intermediate: 10", "experts: 8", "top_k: 3", "shared: 6"] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
    assert!(!shown.contains("ranks"), "{shown}");
    let shown = on_ranks(2, LONG, |_, group| module::<Flex>(&config(), group).to_string());
    assert!(shown[1].contains("rank: 1") && shown[1].contains("ranks: 2"), "{}", shown[1]);
}

fn a_configuration_of_the_crate_is_a_file_of_burns() {
    let config = ExpertParallelMoEConfig::new(biased());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    config.save(&path).unwrap();
    let loaded = ExpertParallelMoEConfig::load(&path).unwrap();
    assert_eq!(loaded, config);
    assert_eq!(loaded.moe, biased());
}

fn a_checkpoint_is_opened_once_and_loaded_as_told() {
    let dir = &golden_of("qwen3_moe");
    let checkpoint = Checkpoint::open(dir).unwrap();
    let group = DeviceGroup::single::<Flex>(&checkpoint.block_config(0).unwrap(), &device()).unwrap();
    let mut seen = Vec::new();
    let mut progress = |p: moebius::checkpoint::Progress<'_>| seen.push((p.done, p.total));
    let load = LoadAs::default().dtype(moebius::DType::BF16).progress(&mut progress);
    let moe = ExpertParallelMoE::<Autodiff<Flex>>::from_checkpoint(&checkpoint, 0, &group, load, &device()).unwrap();
    assert_eq!(moe.experts.up.dtype(), DType::BF16);
    assert!(seen.len() > 1 && seen.last().is_some_and(|(done, total)| done == total), "{seen:?}");
    let stored = ExpertParallelMoE::<Flex>::from_checkpoint(&checkpoint, 0, &group, LoadAs::default(), &device());
    assert_eq!(stored.unwrap().experts.up.dtype(), DType::F32);
}

/// Every way to a module, of a group for another number of experts: the error has the name of the call that was made.
fn an_error_of_making_a_module_names_the_call() {
    let checkpoint = Checkpoint::open(golden_of("qwen3_moe")).unwrap();
    let group = DeviceGroup::single::<Flex>(&MoeConfig::new(H, I, E + 1, 2), &device()).unwrap();
    let block = checkpoint.load_block(0, LoadOptions { rank: 0, ranks: 1, dtype: None }).unwrap();
    let made = [
        ("ExpertParallelMoEConfig::init_on", ExpertParallelMoEConfig::new(config()).init_on(&group, &device())),
        ("ExpertParallelMoE::from_block", ExpertParallelMoE::from_block(block, 0, &group, &device())),
        (
            "ExpertParallelMoE::from_checkpoint",
            ExpertParallelMoE::<Flex>::from_checkpoint(&checkpoint, 0, &group, LoadAs::default(), &device()),
        ),
    ];
    for (call, made) in made {
        let error = made.err().unwrap().to_string();
        assert!(error.starts_with(&format!("{call}: ")), "{error}");
    }
}

/// Gradients of x and of the parameters, of the loss that is made of a leaf x.
fn gradients(
    moe: &ExpertParallelMoE<B>,
    loss: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 1>,
) -> (Vec<f32>, Vec<(String, Vec<f32>)>) {
    let x = tensor::<B, 2>(values(5, 12 * H, 1.0), [12, H]).require_grad();
    let gradients = loss(x.clone()).backward();
    (floats(x.grad(&gradients).unwrap()), gradients_of(moe, &gradients))
}

fn squares(y: Tensor<B, 2>) -> Tensor<B, 1> {
    y.powi_scalar(2).sum()
}

fn training_has_the_losses_gradient_behind_y() {
    let config = config().with_aux(AuxConfig::default().with_balance(0.5).with_z(0.25));
    let moe = module::<B>(&config, single());
    assert!(matches!(moe.last_aux(), Err(Error::Invalid { .. })) && moe.last_load().is_err());
    // 1 and 0.5 are exact in every type, so that the gradient is the same number from the host and from a tensor.
    for scale in [1.0, 0.5] {
        let trained = moe.clone().with_aux_scale(scale);
        let mut full = None;
        let expected = gradients(&moe, |x| {
            let out = full.insert(moe.forward_full(x, None).unwrap());
            squares(out.y.clone()) + out.aux.clone() * scale
        });
        let full = full.expect("a forward");
        let found = gradients(&moe, |x| {
            let y = trained.forward_t(x, true).unwrap();
            assert_eq!(floats(y.clone()), floats(full.y.clone()), "y's value is as it is");
            squares(y)
        });
        assert_eq!(found, expected, "scale {scale}");
        assert_eq!(trained.last_aux().unwrap().get().unwrap(), full.losses.get().unwrap());
        assert_eq!(trained.last_load().unwrap().get().unwrap(), full.load.get().unwrap());
        // Not in evaluation.
        let without = gradients(&moe, |x| squares(moe.forward(x).unwrap()));
        assert_ne!(without, expected);
        assert_eq!(gradients(&moe, |x| squares(trained.forward_t(x, false).unwrap())), without);
    }
    // One that does not train leaves its figures too.
    let x = tensor::<B, 2>(values(6, 4 * H, 1.0), [4, H]);
    let full = moe.forward_full(x.clone(), None).unwrap();
    moe.forward(x).unwrap();
    assert_eq!(moe.last_load().unwrap().get().unwrap(), full.load.get().unwrap());
}

fn training_takes_a_step_of_jitter_each_time() {
    let config = config().with_router(|router| router.with_jitter(0.5));
    let moe = module::<Flex>(&config, single());
    let x = tensor::<Flex, 2>(values(7, 40 * H, 1.0), [40, H]);
    let of = |noise: Option<Noise>| floats(moe.forward_full(x.clone(), noise).unwrap().y);
    let plain = of(None);
    for (seed, first) in [(0, 0), (3, 5)] {
        let moe = moe.clone().with_noise(Noise { seed, step: first });
        // A clone, as an optimizer's step leaves, goes on from there.
        for (step, moe) in (first..).zip([moe.clone(), moe]) {
            let expected = of(Some(Noise { seed, step }));
            assert_eq!(floats(moe.forward_t(x.clone(), true).unwrap()), expected);
            assert_ne!(expected, plain);
            assert_eq!(floats(moe.forward_t(x.clone(), false).unwrap()), plain, "no jitter, and no step");
        }
    }
}

/// Jitter and auxiliary losses know of all ranks' tokens.
fn training_on_two_ranks_is_training_on_one() {
    let config = config()
        .with_router(|router| router.with_jitter(0.5))
        .with_aux(AuxConfig::default().with_balance(0.5).with_z(0.25).with_over_ranks(true));
    let run = |cuts: &[usize]| {
        on_ranks(cuts.len() - 1, LONG, |rank, group| {
            let moe = module::<B>(&config, group);
            let (all, own) = (values(8, 13 * H, 1.0), cuts[rank]..cuts[rank + 1]);
            let x = tensor::<B, 2>(all[own.start * H..own.end * H].to_vec(), [own.len(), H]);
            let y = moe.forward_t(x, true).unwrap();
            let mut gradients = GradientsParams::from_grads(squares(y.clone()).backward(), &moe);
            moe.reduce_gradients(&mut gradients).unwrap();
            let router = gradients.get::<Flex, 2>(moe.router.weight.id).unwrap();
            let losses = moe.last_aux().unwrap().get().unwrap().total();
            assert!(losses > 0.0);
            (floats(y), floats(router), vec![losses as f32])
        })
    };
    let whole = run(&[0, 13]).remove(0);
    let parts = run(&[0, 5, 13]);
    close("y", &[parts[0].0.clone(), parts[1].0.clone()].concat(), &whole.0, FORWARD);
    for part in &parts {
        close("the router's gradient", &part.1, &whole.1, BACKWARD);
        close("the losses", &part.2, &whole.2, FORWARD);
    }
}

tests! {
    fn();
    a_configuration_makes_a_layer_of_any_number_of_tokens,
    layers_are_numbered_in_the_order_of_their_making,
    a_layer_that_one_rank_cannot_make_fails_on_both,
    a_module_shows_its_sizes,
    a_configuration_of_the_crate_is_a_file_of_burns,
    a_checkpoint_is_opened_once_and_loaded_as_told,
    an_error_of_making_a_module_names_the_call,
    training_has_the_losses_gradient_behind_y,
    training_takes_a_step_of_jitter_each_time,
    training_on_two_ranks_is_training_on_one,
}
