//! Conduct that a user of burn expects of any module: `init` on a device, a display, a configuration, loading.

use burn::backend::{Autodiff, Flex};
use burn::config::Config;
use burn::tensor::DType;
use moebius::burn::{DeviceGroup, ExpertParallelMoE, ExpertParallelMoEConfig, LoadAs};
use moebius::checkpoint::Checkpoint;
use moebius::{CommError, Error, MoeConfig};

use super::support::*;
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
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe");
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

tests! {
    fn();
    a_configuration_makes_a_layer_of_any_number_of_tokens,
    layers_are_numbered_in_the_order_of_their_making,
    a_layer_that_one_rank_cannot_make_fails_on_both,
    a_module_shows_its_sizes,
    a_configuration_of_the_crate_is_a_file_of_burns,
    a_checkpoint_is_opened_once_and_loaded_as_told,
}
