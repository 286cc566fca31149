//! Training a model of shards beside one of whole weights.

use super::*;

/// Three steps of burn's AdamW leave what they leave of whole weights, to the bit.
fn three_steps_are_those_of_whole_weights() {
    for size in SIZES {
        let whole = on(size, |place| {
            let mut model = Whole::new(&place.group);
            let Rank { rank, mut same_experts, mut world, .. } = place;
            let (mut adam, mut losses) = (AdamWConfig::new().init(), Vec::new());
            for step in 0..STEPS {
                let loss = model.loss(ids(rank, step));
                losses.extend(floats(loss.clone()));
                let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
                let experts = model.moe.expert_ids();
                let (all, own) = (ReduceOptions::except(&experts), ReduceOptions::only(&experts));
                reduce_gradients_over(&mut *world, &Cpu::new(), &model, all, &mut gradients).unwrap();
                reduce_gradients_over(&mut *same_experts, &Cpu::new(), &model, own, &mut gradients).unwrap();
                model = adam.step(1e-2, model, gradients);
            }
            (losses, model.weights())
        });
        let found = on(size, |place| {
            let mut model = Whole::new(&place.group).sharded(&place).unwrap();
            let (mut adam, mut losses) = (AdamWConfig::new().init(), Vec::new());
            for step in 0..STEPS {
                let loss = place.pass(Phase::Forward, &model, || model.loss(ids(place.rank, step))).unwrap();
                losses.extend(floats(loss.clone()));
                let all = place.pass(Phase::Backward, &model, || Ok(loss.backward())).unwrap();
                let mut gradients = GradientsParams::from_grads(all, &model);
                assert!(gradients.is_empty(), "backward gives none of shards");
                place.finish(&model, &mut gradients).unwrap();
                model = adam.step(1e-2, model, gradients);
            }
            (losses, model.weights())
        });
        for (rank, (found, whole)) in found.into_iter().zip(whole).enumerate() {
            assert_eq!(found.0, whole.0, "losses of rank {rank} at {size:?}");
            for (i, (found, expected)) in found.1.into_iter().zip(own(&whole.1, size, rank)).enumerate() {
                assert_eq!(found, expected, "weight {i} of rank {rank} at {size:?}");
            }
        }
    }
}

/// Parameters, gradients and main gradients of a rank are its shards of all weights but the selection bias.
fn a_rank_holds_its_part_of_everything() {
    let whole = on(SIZES[0], |place| Whole::new(&place.group).num_params()).remove(0);
    for n in [1, 2, 4] {
        let size = Size { ep: 1, n };
        on(size, |place| {
            let weights = Whole::new(&place.group).weights();
            let model = Whole::new(&place.group).sharded(&place).unwrap();
            let expected: usize = own(&weights, size, place.rank).iter().map(Vec::len).sum();
            assert_eq!(model.num_params(), expected);
            // At most 16 lines of padding a rank and weight, of a width that they have.
            let widest = weights.iter().map(|(_, dims)| dims[dims.len() - 1]).max().unwrap();
            assert!(model.num_params() <= (whole - E) / n + E + 16 * widest * weights.len(), "of {whole} over {n}");
            let loss = place.pass(Phase::Forward, &model, || model.loss(ids(place.rank, 0))).unwrap();
            let all = place.pass(Phase::Backward, &model, || Ok(loss.backward())).unwrap();
            let mut gradients = GradientsParams::from_grads(all, &model);
            place.finish(&model, &mut gradients).unwrap();
            assert_eq!(place.experts.chain().memory().main, 4 * (expected - E), "main gradients");
            assert_eq!(gradients.len(), weights.len() - 1);
            let router = gradients.get::<Flex, 2>(model.moe.router.weight.id).unwrap();
            assert_eq!(router.dims(), model.moe.router.weight.dims());
        });
    }
}

/// The shared expert's biases train beside weights that are frozen, where all are shards: their gradients, and all
/// others, are those beside weights that train.
fn shared_biases_train_beside_frozen_weights() {
    for size in [Size { ep: 1, n: 2 }, Size { ep: 2, n: 2 }] {
        let run = |frozen: bool| {
            on(size, |place| {
                let mut model = Whole::new(&place.group).sharded(&place).unwrap();
                if frozen {
                    let shared = model.moe.shared.as_mut().unwrap();
                    for weight in [&mut shared.up, &mut shared.down] {
                        *weight = weight.clone().set_require_grad(false);
                    }
                }
                let loss = place.pass(Phase::Forward, &model, || model.loss(ids(place.rank, 0))).unwrap();
                let all = place.pass(Phase::Backward, &model, || Ok(loss.backward())).unwrap();
                let mut gradients = GradientsParams::from_grads(all, &model);
                place.finish(&model, &mut gradients).unwrap();
                read::<Flex>(&model, &gradients)
            })
        };
        for (found, mut expected) in run(true).into_iter().zip(run(false)) {
            let all = expected.len();
            expected.retain(|(name, ..)| !["moe.shared.up", "moe.shared.down"].contains(&name.as_str()));
            assert_eq!(expected.len(), all - 2);
            assert!(expected.iter().any(|(name, ..)| name == "moe.shared.up_bias"));
            assert_eq!(found, expected, "{size:?}");
        }
    }
}

/// AdamW with main weights over shards of everything: the norm of the gradients, and what the steps leave of the head,
/// have the same bits at every N, where all ranks have the same tokens.
fn main_weights_of_shards_of_everything() {
    let run = |n: usize| {
        let found = on(Size { ep: 1, n }, |place| {
            let mut model = Whole::new(&place.group).sharded(&place).unwrap();
            let mut params = AdamWParam::of_module::<B, _>(&model);
            model.moe.place_shards(&mut params).unwrap();
            for dense in [&model.embed, &model.proj, &model.head] {
                dense.place_shards(&mut params).unwrap();
            }
            let options = AdamWOptions { max_norm: Some(0.5), ..AdamWOptions::default() };
            let groups = [options.group];
            let Rank { rank, group, experts, dense, same_experts, world } = place;
            let mut adam = AdamW::<B>::over_ranks(&Cpu::new(), world, &model, params, options, &groups).unwrap();
            let place = Rank { rank, group, experts, dense, same_experts, world: Box::new(Solo::new(Cpu::new())) };
            for step in 0..2 {
                let loss = place.pass(Phase::Forward, &model, || model.loss(ids(0, step))).unwrap();
                let loss = loss.mul_scalar(1.0 / n as f64);
                let all = place.pass(Phase::Backward, &model, || Ok(loss.backward())).unwrap();
                let mut gradients = GradientsParams::from_grads(all, &model);
                place.finish(&model, &mut gradients).unwrap();
                model = adam.step(model, gradients).unwrap();
            }
            (adam.stats().unwrap(), floats(model.head.shards[0].val()))
        });
        assert!(found.iter().all(|(stats, _)| *stats == found[0].0), "one norm for all ranks");
        let head: Vec<f32> = found.iter().flat_map(|(_, own)| own.clone()).take(VOCABULARY * H).collect();
        (found[0].0, head)
    };
    let alone = run(1);
    assert!(alone.0.steps == 2 && alone.0.norm > 0.5);
    for n in [2, 4] {
        assert!(run(n) == alone, "over {n}");
    }
}

tests! {
    fn();
    three_steps_are_those_of_whole_weights,
    a_rank_holds_its_part_of_everything,
    shared_biases_train_beside_frozen_weights,
    main_weights_of_shards_of_everything,
}
