//! Training with sharded experts beside training with whole ones, and frozen shards.

use super::*;

/// The results of a rank's step.
#[derive(Debug, PartialEq)]
struct Step {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// Gradients as the optimizer takes them, and weights behind its step: of `up` and `down` of each layer, then of
    /// routers and biases.
    experts: Vec<[Vec<f32>; 2]>,
    others: Vec<[Vec<f32>; 2]>,
    /// Gradients of the same as this rank's backward made them, before any sum; none of experts that are sharded.
    own_experts: Vec<Vec<f32>>,
    own_others: Vec<Vec<f32>>,
}

/// Steps of a rank with whole experts, or with sharded ones.
fn train<S: Meshed>(config: &MoeConfig, place: Place<S>, payload: Option<Payload>) -> Vec<Step> {
    let Place { rank, group, shards, mut data, mut world } = place;
    let mut model = Model::<Autodiff<S>>::new(config, &group);
    if let Some(payload) = payload {
        model = model.sharded(&shards, payload);
    }
    let mut optimizer = AdamWConfig::new().init();
    let step = |_| {
        let x = tensor::<Autodiff<S>, 2>(inputs_of(rank, config.hidden).0, [token_counts()[rank], config.hidden])
            .require_grad();
        let pass = |phase| payload.map(|_| shards.begin(phase, &model.layers).unwrap());
        let end = || payload.map(|_| shards.end().unwrap());
        pass(Phase::Forward);
        let (y, aux) = model.forward(x.clone()).unwrap();
        end();
        let loss = y.clone().powi_scalar(2).sum() + aux;
        pass(Phase::Backward);
        let mut all = loss.backward();
        end();
        let dx = floats(x.grad(&all).unwrap());
        let mut gradients = GradientsParams::from_module(&mut all, &model);
        let weight = |moe: &ExpertParallelMoE<Autodiff<S>>| [moe.experts.up.clone(), moe.experts.down.clone()];
        let small = |model: &Model<Autodiff<S>>| {
            let of = |moe: &ExpertParallelMoE<Autodiff<S>>| {
                [
                    moe.router.weight.clone(),
                    moe.experts.up_bias.clone().unwrap(),
                    moe.experts.down_bias.clone().unwrap(),
                ]
            };
            model.layers.iter().flat_map(of).collect::<Vec<_>>()
        };
        let own_of = |param: &Param<Tensor<Autodiff<S>, 2>>, gradients: &GradientsParams| {
            gradients.get::<S, 2>(param.id).map_or_else(|| vec![0.0; param.shape().num_elements()], floats)
        };
        let own_others: Vec<_> = small(&model).iter().map(|param| own_of(param, &gradients)).collect();
        let own_experts = match payload {
            Some(_) => Vec::new(),
            None => {
                model.layers.iter().flat_map(weight).map(|p| floats(gradients.get::<S, 3>(p.id).unwrap())).collect()
            }
        };
        // Expert weights and biases are summed over the ranks that hold the same, the rest over all.
        let experts: Vec<_> = model.layers.iter().flat_map(|moe| moe.expert_ids()).collect();
        let biases: Vec<_> = model.layers.iter().flat_map(|moe| moe.expert_bias_ids()).collect();
        let mut sum = |comm: &mut Comm<S>, options: ReduceOptions<'_>| {
            let device = S::device_of(comm);
            reduce_gradients_over(&mut **comm, &device, &model, options, &mut gradients).unwrap();
        };
        sum(&mut world, ReduceOptions::except(&experts));
        match payload {
            None => sum(&mut data, ReduceOptions::only(&experts)),
            Some(_) => {
                sum(&mut data, ReduceOptions::only(&biases));
                shards.finish(None, &model.layers, &mut gradients).unwrap();
            }
        }
        let params = |model: &Model<Autodiff<S>>| {
            model.layers.iter().flat_map(weight).map(|p| floats(p.val())).collect::<Vec<_>>()
        };
        let of = model.layers.iter().flat_map(weight).map(|p| floats(gradients.get::<S, 3>(p.id).unwrap()));
        let of: Vec<_> = of.collect();
        let d_small: Vec<_> = small(&model).iter().map(|p| floats(gradients.get::<S, 2>(p.id).unwrap())).collect();
        model = optimizer.step(1e-2, model.clone(), gradients);
        let others = small(&model).iter().map(|p| floats(p.val())).zip(d_small).map(|(w, d)| [d, w]).collect();
        let experts = of.into_iter().zip(params(&model)).map(|(d, w)| [d, w]).collect();
        Step { y: floats(y), dx, experts, others, own_experts, own_others }
    };
    (0..STEPS).map(step).collect()
}

/// A gradient is the sum of what these ranks' backwards made: of so many terms in some order, each addition rounds by
/// 2⁻²⁴ of the magnitudes' sum at most.
fn is_sum(name: &str, found: &[f32], terms: &[&[f32]]) {
    for (i, found) in found.iter().enumerate() {
        let term = || terms.iter().map(|term| f64::from(term[i]));
        let (sum, size) = (term().sum::<f64>(), term().map(f64::abs).sum::<f64>());
        let bound = terms.len() as f64 * size / f64::from(1u32 << 24);
        assert!((f64::from(*found) - sum).abs() <= bound, "{name}, element {i}: {found} for {sum}");
    }
}

/// Every gradient that a step's optimizer gets beside the ranks' own: of routers over all ranks, of experts and their
/// biases over those that hold the same.
fn are_sums(name: &str, ep: usize, steps: &[&Step]) {
    for (rank, step) in steps.iter().enumerate() {
        let same: Vec<&Step> = steps.iter().skip(rank % ep).step_by(ep).copied().collect();
        for (i, [found, _]) in step.others.iter().enumerate() {
            // A router and two biases a layer.
            let over = if i % 3 == 0 { steps } else { &same };
            let terms: Vec<&[f32]> = over.iter().map(|step| &step.own_others[i][..]).collect();
            is_sum(&format!("{name}, parameter {i} of rank {rank}"), found, &terms);
        }
        for (i, _) in step.own_experts.iter().enumerate() {
            let terms: Vec<&[f32]> = same.iter().map(|step| &step.own_experts[i][..]).collect();
            is_sum(&format!("{name}, weight {i} of rank {rank}"), &step.experts[i][0], &terms);
        }
    }
}

/// A rank's shard of a whole weight; padding is zeros.
fn cut(whole: &[f32], dims: &[usize], ranks: usize, rank: usize) -> Vec<f32> {
    let whole = CoreTensor::from_vec(whole.to_vec(), dims).unwrap();
    let shards = Shards::new(dims, ranks, EtpOptions::default().pad).unwrap();
    shards.cut(&Cpu::new(), whole.view(), rank).unwrap().as_slice::<f32>().unwrap().to_vec()
}

/// Whole steps beside those of whole experts, to the bit: sums of the ranks' gradients are made in rank order in f32
/// either way, or have two terms.
pub fn as_whole_ones<S: Meshed>(mesh: Mesh, recompute: bool, prefetch: bool) {
    let Mesh { world, ep } = mesh;
    let mut config = config();
    config.recompute = recompute;
    let whole = on_mesh::<S, _>(mesh, prefetch, |place| train(&config, place, None));
    let sharded = on_mesh::<S, _>(mesh, prefetch, |place| train(&config, place, Some(Payload::Plain)));
    let (local, at) = (E / ep, format!("{world} ranks, EP {ep}, recompute {recompute}"));
    let dims = [vec![local, 2 * I, H], vec![local, H, I]];
    for (name, runs) in [("whole", &whole), ("sharded", &sharded)] {
        for step in 0..STEPS {
            let steps: Vec<&Step> = runs.iter().map(|rank| &rank[step]).collect();
            are_sums(&format!("{name}, {at}, step {step}"), ep, &steps);
        }
    }
    assert!(whole[0][0].own_experts.len() == 4 && sharded[0][0].own_experts.is_empty());
    for (rank, (whole, sharded)) in whole.iter().zip(&sharded).enumerate() {
        for (step, (whole, sharded)) in whole.iter().zip(sharded).enumerate() {
            assert_eq!((&whole.y, &whole.dx), (&sharded.y, &sharded.dx), "rank {rank} of {at}, step {step}");
            assert_eq!(whole.others, sharded.others, "rank {rank} of {at}, step {step}");
            for (i, (whole, shard)) in whole.experts.iter().zip(&sharded.experts).enumerate() {
                let of = |t: &Vec<f32>| cut(t, &dims[i % 2], world / ep, rank / ep);
                assert_eq!(shard, &whole.each_ref().map(of), "gradient and weight {i} of rank {rank} of {at}");
                assert!(whole[0].iter().any(|v| *v != 0.0));
            }
        }
    }
}

fn training_with_sharded_experts_is_training_with_whole_ones() {
    let of = |world, ep| Mesh { world, ep };
    as_whole_ones::<Flex>(of(1, 1), false, true);
    as_whole_ones::<Flex>(of(2, 1), false, true);
    as_whole_ones::<Flex>(of(4, 1), true, true);
    as_whole_ones::<Flex>(of(4, 2), false, true);
    as_whole_ones::<Flex>(of(4, 2), true, false);
}

/// The experts are the shards' rounded values, however many ranks share them.
pub fn sent_quantized<S: Meshed>(numbers: &[usize]) {
    let mut config = config();
    (config.hidden, config.intermediate) = (32, 16);
    let y = |ranks: usize, payload: Payload| {
        on_mesh::<S, _>(Mesh { world: ranks, ep: 1 }, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let model = Model::<Autodiff<S>>::new(&config, &group).sharded(&shards, payload);
            let x = tensor::<Autodiff<S>, 2>(inputs_of(rank, config.hidden).0, [token_counts()[rank], config.hidden]);
            shards.begin(Phase::Forward, &model.layers).unwrap();
            let (y, _) = model.forward(x).unwrap();
            shards.end().unwrap();
            floats(y)
        })
    };
    let plain = y(1, Payload::Plain);
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        let alone = y(1, payload);
        assert_ne!(alone[0], plain[0], "{payload:?} rounds");
        for &ranks in numbers {
            assert_eq!(y(ranks, payload)[0], alone[0], "{payload:?} over {ranks} ranks");
        }
    }
}

fn shards_sent_quantized_give_what_a_rank_alone_does() {
    sent_quantized::<Flex>(&[2, 4]);
}

pub fn frozen<S: Meshed>(mesh: Mesh) {
    let config = config();
    on_mesh::<S, _>(mesh, true, |place| {
        let Place { rank, group, shards, .. } = place;
        let model = Model::<Autodiff<S>>::new(&config, &group).no_grad().sharded(&shards, Payload::Plain);
        let x = tensor::<Autodiff<S>, 2>(inputs(rank).0, [token_counts()[rank], H]).require_grad();
        shards.begin(Phase::Forward, &model.layers).unwrap();
        let (y, _) = model.forward(x.clone()).unwrap();
        shards.end().unwrap();
        shards.begin(Phase::Backward, &model.layers).unwrap();
        let mut all = y.sum().backward();
        shards.end().unwrap();
        assert!(x.grad(&all).is_some());
        let mut gradients = GradientsParams::from_module(&mut all, &model);
        shards.finish(None, &model.layers, &mut gradients).unwrap();
        assert!(gradients.is_empty());
        assert_eq!(shards.chain().traffic().reductions, 0);
    });
}

fn frozen_shards_have_no_gradient() {
    frozen::<Flex>(Mesh { world: 2, ep: 1 });
}

tests! {
    fn();
    training_with_sharded_experts_is_training_with_whole_ones,
    shards_sent_quantized_give_what_a_rank_alone_does,
    frozen_shards_have_no_gradient,
}
