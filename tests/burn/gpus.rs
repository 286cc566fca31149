//! The suite's cases over several GPUs: a rank each, on threads, over NCCL. Each is there for every number of ranks, and
//! ignored where there are not as many GPUs.

use std::sync::Arc;
use std::thread;

use burn::backend::Autodiff;
use burn::module::{Param, ParamId};
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use moebius::burn::{DeviceGroup, GradientReducer, ReduceComms, ReduceOptions, ShardedParams, reduce_gradients_over};
use moebius::comm::{Communicator, Solo};
use moebius::config::Payload;
use moebius::cuda::Cuda;
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{Chain, Comms, EtpOptions};

use super::gpu::{Gpu, OneParam, gpu, slow};
use super::sharded::{Links, Mesh, Meshed};
use super::support::*;
use super::{
    dense, dispatch, faults, gradients, main_gradients, nccl_gpus, quantized_shards, reduce, sharded, sharded_dense,
    sharded_model,
};
use crate::trials::{GPUS, Trials};

/// Runs `rank` on a thread and a GPU for each rank.
pub fn on_ranks<T: Send>(ranks: usize, rank: impl Fn(usize, DeviceGroup) -> T + Sync) -> Vec<T> {
    let comms = nccl_gpus::communicators(ranks, LONG);
    thread::scope(|s| {
        let (run, all) = (&rank, all_have_tokens());
        let start = |(number, comm): (usize, moebius::nccl::NcclComm)| {
            s.spawn(move || {
                set_all_have_tokens(all);
                work_on(u16::try_from(number).unwrap());
                let cuda = comm.cuda().clone();
                let group = Group::new(cuda, Box::new(comm), GroupConfig::new(E, 64)).unwrap();
                run(number, group.into())
            })
        };
        let threads: Vec<_> = comms.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

impl Meshed for Gpu {
    fn links(mesh: Mesh) -> Vec<(u16, Links<Self>)> {
        let create = |name: &'static str, members: &[usize]| -> Vec<Box<dyn Communicator<Cuda>>> {
            match *members {
                [alone] => {
                    let own = nccl_gpus::first(alone + 1).1[alone].with_new_stream().unwrap();
                    vec![Box::new(Solo::new(own))]
                }
                _ => nccl_gpus::among(members, name, LONG).into_iter().map(|comm| Box::new(comm) as Box<_>).collect(),
            }
        };
        (0..).zip(mesh.links(create)).collect()
    }

    fn device_of(comm: &Box<dyn Communicator<Cuda>>) -> Cuda {
        comm.device().expect("a communicator that was made with a GPU").clone()
    }

    fn group_of(device: Cuda, experts: Box<dyn Communicator<Cuda>>, config: GroupConfig) -> DeviceGroup {
        Group::new(device, experts, config).unwrap().into()
    }
}

/// A test over so many ranks.
type Case = (&'static str, fn(usize));

/// Half of the ranks divide the experts, and each half holds the same.
fn square(world: usize) -> Mesh {
    Mesh { world, ep: world / 2 }
}

const CASES: [Case; 34] = [
    ("matches_a_dense_model", |ranks| dense::matches_a_dense_model::<Gpu>(&[ranks])),
    ("each_output_alone_gives_its_part", |ranks| dense::each_output_alone::<Gpu>(ranks)),
    ("gradients_are_those_of_finite_differences", |ranks| gradients::finite_differences::<Gpu>(ranks)),
    ("dispatch_and_combine_with_identity_experts", |ranks| dispatch::identity_experts::<Gpu>(&[ranks])),
    ("dispatch_and_combine_make_the_module", |ranks| dispatch::as_the_module::<Gpu>(&[ranks])),
    ("several_dispatches_in_flight", |ranks| dispatch::several_in_flight::<Gpu>(&[ranks])),
    ("sharded_experts_train_as_whole_ones", |world| {
        sharded::training::as_whole_ones::<Gpu>(square(world), false, true)
    }),
    ("sharded_experts_train_as_whole_ones_recomputed", |world| {
        sharded::training::as_whole_ones::<Gpu>(square(world), true, false);
    }),
    ("shards_sent_quantized_give_what_a_rank_alone_does", |ranks| sharded::training::sent_quantized::<Gpu>(&[ranks])),
    ("frozen_shards_have_no_gradient", |world| sharded::training::frozen::<Gpu>(Mesh { world, ep: 1 })),
    ("sharded_dense_weights_train_as_whole_ones", |ranks| sharded_dense::three_steps::<Gpu>(&[ranks])),
    ("a_sharded_norm_has_the_gradients_of_burns", |_| sharded_dense::norm_alone::<Gpu>()),
    ("a_tied_weight_has_the_sum_of_its_gradients", |ranks| sharded_dense::tied::<Gpu>(&[ranks])),
    ("a_model_of_shards_is_saved_and_loaded_at_another_number", |ranks| {
        sharded_model::stored::saved_over_ranks::<Gpu>(ranks)
    }),
    ("experts_are_quantized_where_they_lie", |_| quantized_shards::quantized_where_they_lie::<Gpu>()),
    ("quantized_experts_are_kept_as_stored", |_| quantized_shards::kept_as_stored::<Gpu>()),
    ("quantized_shards_are_the_layer_of_the_block", |ranks| quantized_shards::as_the_block::<Gpu>(ranks)),
    ("frozen_first_layers_have_no_backward", |_| sharded_dense::frozen_first::<Gpu>()),
    ("sums_are_kept_until_all_modules_are_given", |world| sharded::refused::sums_are_kept::<Gpu>(square(world))),
    ("a_rank_that_cannot_begin_tells_those_that_share_shards", |world| {
        sharded::refused::begin_is_told::<Gpu>(Mesh { world, ep: 1 });
    }),
    ("a_rank_that_cannot_begin_tells_those_with_other_experts", |world| {
        sharded::refused::begin_is_told::<Gpu>(Mesh { world, ep: world });
    }),
    ("gradients_are_summed_over_the_ranks", |ranks| reduce::of_a_layer::<Gpu>(ranks)),
    ("sums_beside_backward_are_those_behind_it", |ranks| sums_beside_backward(ranks, Sums::default())),
    ("sums_over_replicas_beside_backward_are_those_behind_it", |ranks| {
        sums_beside_backward(ranks, Sums { replicas: true, ..Sums::default() });
    }),
    ("main_gradients_are_summed_beside_backward", |ranks| {
        sums_beside_backward(ranks, Sums { main_gradients: true, ..Sums::default() });
        sums_beside_backward(ranks, Sums { main_gradients: true, replicas: true });
    }),
    ("another_number_of_microbatches_is_an_error_on_every_rank", other_microbatches),
    ("steps_have_the_same_bits_at_every_number_of_ranks", |ranks| {
        main_gradients::optimizer::same_bits_over_ranks::<Gpu>(&[ranks])
    }),
    ("a_gradient_on_one_rank_alone_steps_nothing", |ranks| {
        main_gradients::optimizer::gradient_on_one_rank::<Gpu>(ranks)
    }),
    ("gradients_are_summed_over_a_communicator_of_another_stream", over_another_stream),
    ("a_reducer_sums_gradients_that_burn_computes", of_late_gradients),
    ("a_backward_against_a_rank_that_tracks_nothing_is_refused", |_| faults::untracked_peer::<Gpu>()),
    ("a_second_backward_is_refused", |_| faults::second_backward_of_a_rank::<Gpu>()),
    ("a_model_that_fails_around_the_layer_tells_the_other_rank", |_| faults::refused_around::<Gpu>()),
    ("sums_over_another_gpu_and_groups_of_another_stream_are_refused", elsewhere),
];

/// Ranks with a communicator each, whose device is a stream of its own beside the module's.
fn beside<T: Send>(ranks: usize, rank: impl Fn(usize, Cuda, Box<dyn Communicator<Cuda>>) -> T + Sync) -> Vec<T> {
    let members: Vec<usize> = (0..ranks).collect();
    let comms = nccl_gpus::among(&members, "beside", LONG);
    thread::scope(|s| {
        let (run, all) = (&rank, all_have_tokens());
        let start = |(number, comm): (usize, moebius::nccl::NcclComm)| {
            s.spawn(move || {
                set_all_have_tokens(all);
                work_on(u16::try_from(number).unwrap());
                let module = comm.cuda().with_new_stream().unwrap();
                run(number, module, Box::new(comm))
            })
        };
        let threads: Vec<_> = comms.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

type A = Autodiff<Gpu>;

/// Which sums a reducer makes: of ranks that divide the experts or are replicas, of burn's gradients of experts or of the
/// module's own.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    replicas: bool,
    main_gradients: bool,
}

/// A reducer's sums over two microbatches: the bits of those behind backward, and the sums of what each rank has.
fn sums_beside_backward(ranks: usize, Sums { replicas, main_gradients }: Sums) {
    let members: Vec<usize> = (0..ranks).collect();
    let own_gpu = |cuda: &Cuda| Box::new(Solo::new(cuda.with_new_stream().unwrap())) as Box<dyn Communicator<Cuda>>;
    let layers: Vec<Box<dyn Communicator<Cuda>>> = match replicas {
        true => members.iter().map(|&gpu| own_gpu(&nccl_gpus::first(gpu + 1).1[gpu])).collect(),
        false => nccl_gpus::among(&members, "layers", LONG).into_iter().map(|comm| Box::new(comm) as Box<_>).collect(),
    };
    let run = |rank: usize, layers: Box<dyn Communicator<Cuda>>, sums: Box<dyn Communicator<Cuda>>| {
        let cuda = Gpu::device_of(&layers);
        let comms = match replicas {
            true => ReduceComms { group: own_gpu(&cuda), replicas: Some(sums) },
            false => ReduceComms { group: sums, replicas: None },
        };
        let model = module::<A>(&config(), &Gpu::group(cuda.clone(), layers));
        let loss = |factor: f32| {
            let x = tensor::<A, 2>(inputs(rank).0, [token_counts()[rank], H]).mul_scalar(factor);
            model.forward(x).unwrap().powi_scalar(2).sum()
        };
        let values = |gradients: &GradientsParams| {
            let own = [&model.router.weight, &model.shared.as_ref().unwrap().up];
            let own = own.map(|p| floats(gradients.get::<Gpu, 2>(p.id).unwrap()));
            own.into_iter().chain([floats(gradients.get::<Gpu, 3>(model.experts.up.id).unwrap())]).collect::<Vec<_>>()
        };
        let own = [1.0, 0.5].map(|factor| values(&GradientsParams::from_grads(loss(factor).backward(), &model)));
        let reducer = GradientReducer::<A>::new(&cuda, comms).unwrap().with_layer(&model);
        let mut reducer = if main_gradients { reducer.with_main_gradients_in_f32() } else { reducer };
        reducer.backward(loss(1.0), &model).unwrap();
        reducer.backward(loss(0.5), &model).unwrap();
        let behind = values(&reducer.reduce(&model).unwrap());
        reducer.backward(loss(1.0), &model).unwrap();
        let beside = values(&reducer.backward_reduced(loss(0.5), &model).unwrap());
        assert_eq!(beside, behind, "rank {rank}");
        (own, beside)
    };
    let found: Vec<_> = thread::scope(|s| {
        let (run, all) = (&run, all_have_tokens());
        let sums = nccl_gpus::among(&members, "sums", LONG);
        let start = |(rank, (layers, sums))| {
            s.spawn(move || {
                set_all_have_tokens(all);
                work_on(u16::try_from(rank).unwrap());
                run(rank, layers, Box::new(sums))
            })
        };
        let threads: Vec<_> = layers.into_iter().zip(sums).enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (rank, (_, sums)) in found.iter().enumerate() {
        for (at, sums) in sums.iter().enumerate() {
            // The last are experts', which replicas alone sum.
            let of = if at < 2 || replicas { 0..ranks } else { rank..rank + 1 };
            for (i, sum) in sums.iter().enumerate() {
                let terms = || found[of.clone()].iter().flat_map(|(own, _)| own).map(|own| f64::from(own[at][i]));
                let (exact, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                // A rounding of 2⁻²⁴ an addition of f32, of the magnitudes' sum.
                let bound = 2.0 * ranks as f64 * size / f64::from(1u32 << 24);
                assert!((f64::from(*sum) - exact).abs() <= bound, "rank {rank}, {at}: {sum} for {exact}");
            }
        }
    }
}

/// Rank 0 has had one microbatch more than the others: each rank's sum is an error that says so, and the next step's is not.
fn other_microbatches(ranks: usize) {
    let members: Vec<usize> = (0..ranks).collect();
    let layers: Vec<_> = members
        .iter()
        .map(|&gpu| Solo::new(nccl_gpus::first(gpu + 1).1[gpu].with_new_stream().unwrap()))
        .map(|own| std::sync::Mutex::new(Some(own)))
        .collect();
    beside(ranks, |rank, _, comm| {
        let own: Box<dyn Communicator<Cuda>> = Box::new(layers[rank].lock().unwrap().take().unwrap());
        let cuda = Gpu::device_of(&own);
        let model = module::<A>(&config(), &Gpu::group(cuda.clone(), own));
        let alone = Box::new(Solo::new(cuda.with_new_stream().unwrap())) as Box<dyn Communicator<Cuda>>;
        let comms = ReduceComms { group: alone, replicas: Some(comm) };
        let reducer = GradientReducer::<A>::new(&cuda, comms).unwrap().with_layer(&model);
        let mut reducer = reducer.with_main_gradients_in_f32();
        let backward = |reducer: &mut GradientReducer<A>| {
            let x = tensor::<A, 2>(inputs(rank).0, [token_counts()[rank], H]);
            reducer.backward(model.forward(x).unwrap().sum(), &model).unwrap();
        };
        let own = if rank == 0 { 2 } else { 1 };
        (0..own).for_each(|_| backward(&mut reducer));
        let error = reducer.reduce(&model).map(drop).unwrap_err().to_string();
        assert!(error.contains("microbatches"), "rank {rank}: {error}");
        assert_eq!(reducer.microbatches(), own);
        if rank > 0 {
            backward(&mut reducer);
        }
        reducer.reduce(&model).map(drop).unwrap();
    });
}

/// A gradient that burn writes late is read after that, and its sum before burn writes its memory again.
fn over_another_stream(ranks: usize) {
    let (rows, width) = (1024, 1024);
    let found = beside(ranks, |rank, cuda, mut comm| {
        let device = here::<Gpu>();
        let layer = LinearConfig::new(width, rows).with_bias(false).init::<A>(&device);
        let big = Tensor::<Gpu, 2>::zeros([4096, 4096], &device);
        let mut sums = Vec::new();
        for step in 0..10 {
            let value = (10 * step + rank + 1) as f32;
            let late = (0..8).fold(big.clone(), |product, _| product.matmul(big.clone()));
            let gradient =
                Tensor::<Gpu, 2>::full([width, rows], value, &device) + late.slice([0..1, 0..1]).expand([width, rows]);
            let mut gradients = GradientsParams::new();
            gradients.register(layer.weight.id, gradient);
            reduce_gradients_over(&mut *comm, &cuda, &layer, ReduceOptions::default(), &mut gradients).unwrap();
            let sum = gradients.remove::<Gpu, 2>(layer.weight.id).unwrap();
            let copy = sum.add_scalar(0.0);
            let _overwrites = Tensor::<Gpu, 2>::full([width, rows], f32::NAN, &device);
            sums.push(floats(copy));
        }
        sums
    });
    for (rank, sums) in found.iter().enumerate() {
        for (step, sum) in sums.iter().enumerate() {
            // Whole numbers below 2^24.
            let expected = (0..ranks).map(|rank| (10 * step + rank + 1) as f32).sum::<f32>();
            assert!(sum.iter().all(|v| *v == expected), "rank {rank}, step {step}: {} for {expected}", sum[0]);
        }
    }
}

/// The same of a reducer's sums.
fn of_late_gradients(ranks: usize) {
    let found = beside(ranks, |rank, cuda, comm| {
        assert!(floats(slow::<Gpu>(7.0)).iter().all(|v| *v == 7.0));
        let weight = Tensor::<A, 2>::ones([2048, 2048], &here::<Gpu>()).require_grad();
        let model = OneParam { weight: Param::initialized(ParamId::new(), weight) };
        let mut reducer = GradientReducer::<A>::new(&cuda, ReduceComms { group: comm, replicas: None }).unwrap();
        let loss = (model.weight.val() * Tensor::from_inner(slow::<Gpu>((rank + 1) as f32))).sum();
        reducer.backward(loss, &model).unwrap();
        let sums = reducer.reduce(&model).unwrap();
        floats(sums.get::<Gpu, 2>(model.weight.id).unwrap())
    });
    let expected = (1..=ranks).sum::<usize>() as f32;
    found.iter().for_each(|sum| assert!(sum.iter().all(|v| *v == expected), "{} for {expected}", sum[0]));
}

/// Each rank gets its own error, before anything runs, or hears the other's.
fn elsewhere(ranks: usize) {
    let texts = beside(ranks, |rank, cuda, mut comm| {
        let device = here::<Gpu>();
        let layer = LinearConfig::new(8, 8).init::<A>(&device);
        let mut gradients = GradientsParams::new();
        let other = Cuda::new((rank + 1) % ranks).unwrap();
        let error = reduce_gradients_over(&mut *comm, &other, &layer, ReduceOptions::default(), &mut gradients);
        let wrong = error.err().map(|e| e.to_string()).unwrap_or_default();
        // A chain on the group's GPU, with another stream.
        let solo = || Box::new(Solo::new(cuda.with_new_stream().unwrap())) as Box<dyn Communicator<Cuda>>;
        let comms = Comms { gather: solo(), reduce: solo() };
        let chain = Chain::new(cuda.with_new_stream().unwrap(), comms, EtpOptions::default()).unwrap();
        let group = <Gpu as Meshed>::group(cuda.clone(), solo());
        let moe = module::<Gpu>(&config(), group).into_sharded(&ShardedParams::new(Arc::new(chain)), Payload::Plain);
        (wrong, moe.err().map(|e| e.to_string()).unwrap_or_default())
    });
    for (wrong, stream) in texts {
        assert!(wrong.contains("one of another"), "{wrong}");
        assert!(stream.contains("another stream"), "{stream}");
    }
}

/// Adds them all.
pub fn add(trials: &mut Trials) {
    let found = nccl_gpus::available().unwrap_or(0);
    for ranks in GPUS {
        for (name, run) in CASES {
            trials.add_gpus(format!("nccl::r{ranks}::{name}"), (ranks, found), move || {
                let _alone = gpu();
                set_all_have_tokens(true);
                run(ranks);
                set_all_have_tokens(false);
            });
        }
    }
}
