//! The module's configuration, records, outputs and training.

use burn::backend::Flex;
use burn::config::Config;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, NamedMpkFileRecorder, Recorder};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use moebius::burn::{DeviceGroup, ExpertParallelMoE, ExpertParallelMoEConfig, LoadAs, ReduceOptions, reduce_gradients};
use moebius::checkpoint::Checkpoint;
use moebius::layer::ParamKind;

use super::support::*;
use crate::goldens::golden_of;
use crate::trials::tests;

fn a_record_holds_the_parameters_under_the_crates_names() {
    let _alone = generator();
    let config = biased();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    on_ranks(2, LONG, |rank, group| {
        let path = path.with_file_name(format!("layer{rank}"));
        let model = module::<B>(&config, &group);
        let x = tensor::<B, 2>(inputs(rank).0, [token_counts()[rank], H]);
        let y = floats(model.forward(x.clone()).unwrap());
        let recorder = NamedMpkFileRecorder::<FullPrecisionSettings>::default();
        model.clone().save_file(&path, &recorder).unwrap();
        let bytes = BinBytesRecorder::<FullPrecisionSettings>::default().record(model.into_record(), ()).unwrap();

        Flex::seed(&device(), crate::trials::seed::seed(9));
        let fresh =
            || ExpertParallelMoEConfig::from(&config).with_number(Some(3)).init_on::<B>(&group, &device()).unwrap();
        let before = floats(fresh().forward(x.clone()).unwrap());
        assert_ne!(before, y);
        let loaded = fresh().load_file(&path, &recorder, &device()).unwrap();
        assert_eq!(floats(loaded.forward(x.clone()).unwrap()), y);
        assert!(loaded.experts.up.is_require_grad());
        assert!(!loaded.router.selection_bias.as_ref().unwrap().is_require_grad());
        let record = BinBytesRecorder::<FullPrecisionSettings>::default().load(bytes, &device()).unwrap();
        assert_eq!(floats(fresh().load_record(record).forward(x).unwrap()), y);

        struct Names(Vec<String>, Vec<String>);
        impl<Bk: Backend> ModuleVisitor<Bk> for Names {
            fn enter_module(&mut self, name: &str, _: &str) {
                self.0.push(name.to_string());
            }
            fn exit_module(&mut self, _: &str, _: &str) {
                self.0.pop();
            }
            fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<Bk, D>>) {
                self.1.push(self.0.join("."));
            }
        }
        let mut names = Names(vec![], vec![]);
        loaded.visit(&mut names);
        assert_eq!(names.1, ParamKind::ALL.map(ParamKind::name));
    });
}

fn the_configuration_survives_a_file_and_the_cores_form() {
    let moe = biased().with_router(|r| r.with_scale(2.5).with_renorm(None)).with_recompute(true);
    let moe = moe.with_payload(moebius::config::Payload::Nvfp4);
    let config = ExpertParallelMoEConfig::new(moe.clone()).with_number(Some(7));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    config.save(&path).unwrap();
    assert_eq!(ExpertParallelMoEConfig::load(&path).unwrap(), config);
    assert_eq!(config.moe, moe);
    assert_eq!(ExpertParallelMoEConfig::from(&moe).with_number(Some(7)), config);
}

fn training_lowers_the_loss_and_keeps_the_ranks_together() {
    let _alone = generator();
    #[derive(Module, Debug)]
    struct Model<B: Backend> {
        first: burn::nn::Linear<B>,
        moe: ExpertParallelMoE<B>,
    }
    let config = ExpertParallelMoEConfig::from(config());
    let weights = |ranks: usize| {
        Flex::seed(&device(), crate::trials::seed::seed(7));
        on_ranks(ranks, LONG, |_, group| {
            let moe = config.init_on::<Flex>(&group, &device()).unwrap();
            (floats(moe.router.weight.val()), floats(moe.experts.down.val()))
        })
    };
    let (one, two) = (weights(1), weights(2));
    assert_eq!(one[0].0, two[0].0);
    assert_eq!(one[0].0, two[1].0);
    assert_eq!(one[0].1, [two[0].1.clone(), two[1].1.clone()].concat(), "the same experts, whatever R");

    Flex::seed(&device(), crate::trials::seed::seed(8));
    let runs = on_ranks(2, LONG, |rank, group| {
        let group = DeviceGroup::from(group);
        let moe = config.init_on::<B>(&group, &device()).unwrap();
        // Equal on both ranks: values are given, not drawn.
        let mut first = burn::nn::LinearConfig::new(H, H).with_bias(false).init::<B>(&device());
        first.weight = Param::from_tensor(tensor(values(5, H * H, 0.5), [H, H]));
        let mut model = Model { first, moe };
        let mut optimizer = AdamWConfig::new().init();
        let (x, target) = inputs(rank);
        let (x, target) =
            (tensor::<B, 2>(x, [token_counts()[rank], H]), tensor::<B, 2>(target, [token_counts()[rank], H]));
        let mut losses = vec![];
        for _ in 0..40 {
            let out = model.moe.forward_full(model.first.forward(x.clone()), None).unwrap();
            let loss = (out.y - target.clone()).powi_scalar(2).mean();
            losses.push(floats(loss.clone())[0]);
            let mut gradients = GradientsParams::from_grads((loss + out.aux).backward(), &model);
            let experts = model.moe.expert_ids();
            reduce_gradients(&group, &model, ReduceOptions::except(&experts), &mut gradients).unwrap();
            model = optimizer.step(1e-2, model, gradients);
        }
        let replicated = (floats(model.moe.router.weight.val()), floats(model.moe.shared.unwrap().up.val()));
        (losses, replicated, floats(model.first.weight.val()))
    });
    for (losses, _, _) in &runs {
        assert!(losses[39] < 0.5 * losses[0], "{losses:?}");
    }
    assert_eq!(runs[0].1, runs[1].1, "router and shared expert stay equal");
    assert_eq!(runs[0].2, runs[1].2);
}

fn an_absent_gradient_of_a_replicated_parameter_counts_as_zeros() {
    let config = config();
    let sums = on_ranks(2, LONG, |rank, group| {
        let model = module::<B>(&config, &group);
        let y = model.forward(tensor::<B, 2>(inputs(rank).0, [token_counts()[rank], H])).unwrap();
        let mut gradients = GradientsParams::from_grads(y.sum().backward(), &model);
        if rank == 1 {
            gradients.remove::<Flex, 2>(model.router.weight.id).unwrap();
        }
        let own = gradients.get::<Flex, 2>(model.router.weight.id).map(floats);
        model.reduce_gradients(&mut gradients).unwrap();
        (own, floats(gradients.get::<Flex, 2>(model.router.weight.id).unwrap()))
    });
    assert_eq!(sums[0].0.as_ref(), Some(&sums[0].1));
    assert_eq!(sums[0].1, sums[1].1);
}

fn ids_come_as_data() {
    let config = config();
    let group = single();
    let model = module::<Flex>(&config, &group);
    let out = model.forward_full(tensor::<Flex, 2>(inputs(0).0, [token_counts()[0], H]), None).unwrap();
    let ids: Tensor<Flex, 2, Int> = out.ids;
    assert_eq!(ids.dims(), [token_counts()[0], K]);
    assert_eq!(out.logits.dims(), [token_counts()[0], E]);
    assert_eq!(out.load.get().unwrap().tokens_per_expert.iter().sum::<usize>(), token_counts()[0] * K);
    let sums = floats(out.weights.sum_dim(1));
    // Renormalized: a sum of three f32.
    assert!(sums.iter().all(|s| (s - 1.0).abs() < 4.0 * f32::EPSILON));
}

fn a_checkpoint_gives_a_rank_its_experts_in_their_type() {
    use burn::tensor::DType;
    let dir = &golden_of("qwen3_moe_bf16");
    on_ranks(4, LONG, |_, group| {
        let model = ExpertParallelMoE::<B>::from_checkpoint(
            &Checkpoint::open(dir).unwrap(),
            0,
            &group,
            LoadAs::default(),
            &device(),
        )
        .unwrap();
        let hidden = model.layer().config().hidden;
        assert_eq!(model.experts.up.dims(), [E / 4, model.layer().config().up_rows(), hidden]);
        assert_eq!(model.experts.up.dtype(), DType::BF16);
        let x = Tensor::<B, 2>::zeros([1, hidden], &device()).cast(DType::BF16);
        assert_eq!(model.forward(x).unwrap().dtype(), DType::BF16);
    });
}

tests! {
    fn();
    a_record_holds_the_parameters_under_the_crates_names,
    the_configuration_survives_a_file_and_the_cores_form,
    training_lowers_the_loss_and_keeps_the_ranks_together,
    an_absent_gradient_of_a_replicated_parameter_counts_as_zeros,
    ids_come_as_data,
    a_checkpoint_gives_a_rank_its_experts_in_their_type,
}
