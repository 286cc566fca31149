//! Experts' gradients that the layer's kernels add up in place, in f32 beside parameters of 16 bits, and AdamW with main
//! weights over burn's modules: against burn's own gradients, against candle's adapter, over ranks, and where a backward
//! fails.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};
use moebius::burn::{AdamW, AdamWParam, CoreDevice, DeviceGroup, ExpertParallelMoE, GradientReducer, MoeBackend};
use moebius::comm::Communicator;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::layer::ParamKind;
use moebius::optim::{AdamWOptions, GroupOptions, LossScaling};
use moebius::{CheckpointError, Error, MoeConfig};

use super::reducer::{Doing, Model, Place, places, tokens};
use super::support::*;
use crate::trials::tests;

const MICROBATCHES: usize = 3;

/// Parameters by path, with their ids.
type Values = Vec<(String, ParamId, Vec<f32>)>;

/// A module with parameters of another type.
pub fn cast<S: Subject, M: Module<Autodiff<S>>>(module: M, dtype: DType) -> M {
    struct Cast(DType);
    impl<S: Subject> ModuleMapper<Autodiff<S>> for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Autodiff<S>, D>>) -> Param<Tensor<Autodiff<S>, D>> {
            let tracked = param.is_require_grad();
            let value = param.val().detach().cast(self.0).detach().set_require_grad(tracked);
            Param::initialized(param.id, value)
        }
    }
    module.map(&mut Cast(dtype))
}

/// Values of a module's gradients by path, with their types.
pub type Found = Vec<(String, DType, Vec<f32>)>;

struct Read<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    found: Found,
}

impl<S: Subject> ModuleVisitor<Autodiff<S>> for Read<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<S>, D>>) {
        if let Some(gradient) = self.gradients.get::<S, D>(param.id) {
            assert_eq!(gradient.dims(), param.dims());
            self.found.push((self.path.join("."), gradient.dtype(), floats(gradient)));
        }
    }
}

pub fn read<S: Subject>(moe: &impl Module<Autodiff<S>>, gradients: &GradientsParams) -> Found {
    let mut read = Read { gradients, path: Vec::new(), found: Vec::new() };
    moe.visit(&mut read);
    read.found
}

fn loss<S: Subject>(moe: &ExpertParallelMoE<Autodiff<S>>, microbatch: usize, dtype: DType) -> Tensor<Autodiff<S>, 1> {
    let (x, c) = inputs(microbatch % 2);
    let dims = [token_counts()[microbatch % 2], H];
    let scale = 1.0 + microbatch as f32;
    let x = tensor::<Autodiff<S>, 2>(x, dims).mul_scalar(scale).cast(dtype);
    let c = tensor::<Autodiff<S>, 2>(c, dims).cast(dtype);
    (moe.forward(x).unwrap() * c).cast(DType::F32).sum()
}

/// The core's device of a group.
fn core<S: Subject + MoeBackend<Native = S>>(group: &DeviceGroup) -> CoreDevice<S> {
    group.on::<CoreDevice<S>>().expect("a group of the back end's").lock().device().clone()
}

/// Sums in f32 are those of each microbatch's f32 gradients, which round to burn's own; in the parameters' type they have
/// that type.
pub fn added_up<S: Subject + MoeBackend<Native = S>>() {
    for dtype in [DType::F32, DType::BF16] {
        let group = S::alone();
        let device = core::<S>(&group);
        let moe = cast::<S, _>(module::<Autodiff<S>>(&config(), group), dtype);
        let reducer = || GradientReducer::<Autodiff<S>>::alone(&device).unwrap().with_layer(&moe);
        let run = |mut reducer: GradientReducer<Autodiff<S>>, which: std::ops::Range<usize>| {
            for microbatch in which.clone() {
                reducer.backward(loss::<S>(&moe, microbatch, dtype), &moe).unwrap();
            }
            assert_eq!(reducer.microbatches(), which.len() as u64);
            let found = read::<S>(&moe, &reducer.reduce(&moe).unwrap());
            assert_eq!(reducer.microbatches(), 0);
            found
        };
        let each: Vec<Found> =
            (0..MICROBATCHES).map(|m| run(reducer().with_main_gradients_in_f32(), m..m + 1)).collect();
        for (microbatch, wide) in each.iter().enumerate() {
            let own = run(reducer(), microbatch..microbatch + 1);
            let in_place = run(reducer().with_main_gradients(), microbatch..microbatch + 1);
            assert_eq!(in_place, own, "{dtype:?}");
            for ((name, wide_type, wide), (_, own_type, own)) in wide.iter().zip(&own) {
                assert_eq!((*wide_type, *own_type), (DType::F32, dtype), "{name}");
                let rounded: Vec<f32> = match dtype {
                    DType::F32 => wide.clone(),
                    _ => wide.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect(),
                };
                assert_eq!(&rounded, own, "{name} in {dtype:?}");
                let holds_more = rounded != *wide;
                // Experts' gradients come as the kernels make them; burn's others are of the parameter's type.
                assert_eq!(holds_more, dtype != DType::F32 && name.starts_with("experts"), "{name} in {dtype:?}");
            }
        }
        let all = run(reducer().with_main_gradients_in_f32(), 0..MICROBATCHES);
        for (at, (name, found_type, found)) in all.iter().enumerate() {
            let sum = |i: usize| each[1..].iter().fold(each[0][at].2[i], |sum, one| sum + one[at].2[i]);
            let sums: Vec<f32> = (0..found.len()).map(sum).collect();
            assert_eq!((*found_type, found), (DType::F32, &sums), "{name} in {dtype:?}");
        }
        let narrow = run(reducer().with_main_gradients(), 0..MICROBATCHES);
        assert!(narrow.iter().all(|(_, found_type, _)| *found_type == dtype));
        for ((name, _, narrow), (_, _, wide)) in narrow.iter().zip(&all) {
            // A rounding of 2⁻⁹ a microbatch of sums no larger than the microbatches' magnitudes.
            let at = all.iter().position(|(other, ..)| other == name).unwrap();
            for (i, (a, b)) in narrow.iter().zip(wide).enumerate() {
                let size: f32 = each.iter().map(|one| one[at].2[i].abs()).sum();
                let bound = if dtype == DType::F32 { 0.0 } else { 2.0 * MICROBATCHES as f32 * size / 512.0 };
                assert!((a - b).abs() <= bound, "{name}: {a}, {b} in f32");
            }
        }
    }
}

fn sums_in_f32_are_those_of_each_microbatch() {
    added_up::<Flex>();
}

/// Over ranks and replicas: sums beside backward have the bits of those behind it, of a layer that is called twice too.
fn sums_over_ranks_beside_backward_are_those_behind_it() {
    for (mesh, dtype, wide) in [
        ([1, 2], DType::F32, true),
        ([2, 2], DType::F32, false),
        ([1, 2], DType::BF16, true),
        ([2, 1], DType::BF16, true),
        ([2, 2], DType::BF16, true),
        ([2, 2], DType::BF16, false),
    ] {
        for late in [false, true] {
            places(mesh, |place| {
                let Place { replica, group, comms, .. } = place;
                let model = Model::new(&group, dtype);
                let reducer = if late { model.reducer(comms).with_late_experts() } else { model.reducer(comms) };
                let mut reducer = match wide {
                    true => reducer.with_main_gradients_in_f32(),
                    false => reducer.with_main_gradients(),
                };
                let loss =
                    |microbatch| model.loss(tokens((replica, &group), microbatch, dtype), Doing::nothing()).unwrap();
                (0..3).for_each(|microbatch| reducer.backward(loss(microbatch), &model).unwrap());
                let behind = model.values(&reducer.reduce(&model).unwrap());
                (0..2).for_each(|microbatch| reducer.backward(loss(microbatch), &model).unwrap());
                let beside = model.values(&reducer.backward_reduced(loss(2), &model).unwrap());
                assert!(beside == behind, "{mesh:?} {dtype:?}");
                let expected = if wide { DType::F32 } else { dtype };
                let types = beside.iter().filter_map(|gradient| gradient.values.as_ref().map(|(dtype, _)| *dtype));
                assert!(types.into_iter().all(|found| found == expected));
            });
        }
    }
}

/// An expert's weight whose gradient the kernels have added up, and that comes through burn's graph in the microbatch that
/// begins the sums: refused with what to do, and not as another operation's; named as late it is summed.
fn an_expert_that_goes_burns_way_once() {
    let run = |late: bool| {
        places([2, 1], |place| {
            let Place { replica, group, comms, .. } = place;
            let moe = module::<B>(&config(), moebius::burn::DeviceGroup::from(&group));
            // One weight is the result of an operation, and the others are leaves still: all go burn's way.
            let computed = || {
                let (mut computed, down) = (moe.clone(), &moe.experts.down);
                computed.experts.down = Param::initialized(down.id, down.val().mul_scalar(2.0));
                computed
            };
            let reducer = GradientReducer::<B>::new(&Cpu::new(), comms).unwrap().with_layer(&moe);
            let reducer = reducer.with_main_gradients_in_f32();
            let mut reducer = if late { reducer.with_late_params(&moe.expert_ids()) } else { reducer };
            let loss = |moe: &ExpertParallelMoE<B>, microbatch: usize| {
                loss::<Flex>(moe, microbatch, DType::F32).mul_scalar(1.0 + replica as f32)
            };
            reducer.backward(loss(&moe, 0), &moe).unwrap();
            if !late {
                return reducer
                    .backward_reduced(loss(&computed(), 1), &moe)
                    .map(drop)
                    .map_err(|error| error.to_string());
            }
            let beside = reducer.backward_reduced(loss(&computed(), 1), &moe).unwrap();
            reducer.backward(loss(&moe, 0), &moe).unwrap();
            reducer.backward(loss(&computed(), 1), &moe).unwrap();
            let behind = reducer.reduce(&moe).unwrap();
            for ((name, _, beside), (_, _, behind)) in
                read::<Flex>(&moe, &beside).iter().zip(&read::<Flex>(&moe, &behind))
            {
                assert!(beside == behind, "{name}: {:?} and {:?}", &beside[..2], &behind[..2]);
            }
            Ok(())
        })
    };
    assert_eq!(run(true), [Ok(()), Ok(())]);
    for error in run(false) {
        let error = error.unwrap_err();
        assert!(error.contains("burn's graph") && error.contains("with_late_params"), "{error}");
        assert!(!error.contains("another operation"), "{error}");
    }
}

/// A given gradient of y is that of the loss Σ y·c.
fn a_given_gradient_is_a_losses() {
    let moe = module::<B>(&config(), single());
    let mut reducer = GradientReducer::<B>::alone(&Cpu::new()).unwrap().with_layer(&moe).with_main_gradients_in_f32();
    (0..2).for_each(|microbatch| reducer.backward(loss::<Flex>(&moe, microbatch, DType::F32), &moe).unwrap());
    let expected = read::<Flex>(&moe, &reducer.reduce(&moe).unwrap());
    for microbatch in 0..2 {
        let ((x, c), dims) = (inputs(microbatch), [token_counts()[microbatch], H]);
        let x = tensor::<B, 2>(x, dims).mul_scalar(1.0 + microbatch as f32);
        reducer.backward_with(moe.forward(x).unwrap(), tensor::<Flex, 2>(c, dims), &moe).unwrap();
    }
    assert_eq!(read::<Flex>(&moe, &reducer.reduce(&moe).unwrap()), expected);
    let constant = tensor::<B, 2>(vec![0.0; H], [1, H]);
    let error = reducer.backward_with(constant, tensor::<Flex, 2>(vec![0.0; H], [1, H]), &moe);
    assert!(matches!(error, Err(Error::Invalid { .. })) && reducer.microbatches() == 0, "{error:?}");
}

/// Where a layer has begun to write, the step's sums are lost and the reducer begins anew; before that they are as they
/// were.
fn a_backward_that_fails() {
    let group = single();
    let moe = module::<B>(&config(), group);
    let mut reducer = GradientReducer::<B>::alone(&Cpu::new()).unwrap().with_layer(&moe).with_main_gradients_in_f32();
    let loss = |microbatch| loss::<Flex>(&moe, microbatch, DType::F32);
    let mut expected = |which: &[usize]| {
        which.iter().for_each(|m| reducer.backward(loss(*m), &moe).unwrap());
        read::<Flex>(&moe, &reducer.reduce(&moe).unwrap())
    };
    let (two, one) = (expected(&[0, 1]), expected(&[1]));
    let fails = || Doing::new(|| panic!("an operation of the user's own"));
    let x = || tensor::<B, 2>(inputs(0).0, [token_counts()[0], H]);
    let run = |reducer: &mut GradientReducer<B>, loss| {
        let done = catch_unwind(AssertUnwindSafe(|| reducer.backward(loss, &moe)));
        assert!(done.is_err(), "it unwinds");
    };
    reducer.backward(loss(0), &moe).unwrap();
    // Before the layer's backward.
    run(&mut reducer, fails().apply(moe.forward(x()).unwrap()).sum());
    assert_eq!(reducer.microbatches(), 1);
    reducer.backward(loss(1), &moe).unwrap();
    assert_eq!(read::<Flex>(&moe, &reducer.reduce(&moe).unwrap()), two);
    // Behind it.
    reducer.backward(loss(0), &moe).unwrap();
    run(&mut reducer, moe.forward(fails().apply(x().require_grad())).unwrap().sum());
    assert_eq!(reducer.microbatches(), 0);
    reducer.backward(loss(1), &moe).unwrap();
    assert_eq!(read::<Flex>(&moe, &reducer.reduce(&moe).unwrap()), one);
}

fn options() -> AdamWOptions {
    let group = GroupOptions { lr: 0.01, ..GroupOptions::default() };
    AdamWOptions { group, max_norm: Some(0.5), ..AdamWOptions::default() }
}

/// Parameters by path, as f32.
fn params<M: Module<B>>(module: &M) -> Values {
    struct Read(Vec<String>, Values);
    impl ModuleVisitor<B> for Read {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_string());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.1.push((self.0.join("."), param.id, floats(param.val())));
        }
    }
    let mut read = Read(Vec::new(), Vec::new());
    module.visit(&mut read);
    read.1
}

/// A gradient of all ranks' parameter, of which a rank takes its part.
fn given(kind: ParamKind, config: &MoeConfig, (rank, ranks): (usize, usize), step: u64) -> Option<TensorData> {
    let (mut dims, seed) = (kind.dims(config, E)?, 700 + 20 * step + kind as u64);
    let all = values(seed, dims.iter().product(), 0.3);
    let parts = if kind.is_replicated() { 1 } else { ranks };
    dims[0] /= parts;
    let count = all.len() / parts;
    let own = if parts == 1 { 0 } else { rank };
    Some(TensorData::new(all[own * count..][..count].to_vec(), dims))
}

/// Gives a parameter a gradient.
fn register<S: Subject>(gradients: &mut GradientsParams, id: ParamId, data: TensorData) {
    let device = &here::<S>();
    match data.shape.len() {
        1 => gradients.register::<S, 1>(id, Tensor::from_data(data, device)),
        2 => gradients.register::<S, 2>(id, Tensor::from_data(data, device)),
        _ => gradients.register::<S, 3>(id, Tensor::from_data(data, device)),
    }
}

/// Parameters after three steps of given gradients, with their gradients' norm.
#[cfg(feature = "burn-cuda")]
fn stepped<S: Subject + MoeBackend<Native = S>>(dtype: DType) -> (f64, Vec<(String, Vec<f32>)>) {
    struct Read<S>(Vec<String>, Values, std::marker::PhantomData<S>);
    impl<S: Subject> ModuleVisitor<Autodiff<S>> for Read<S> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_string());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<S>, D>>) {
            self.1.push((self.0.join("."), param.id, floats(param.val())));
        }
    }
    let read = |moe: &ExpertParallelMoE<Autodiff<S>>| {
        let mut read = Read::<S>(Vec::new(), Vec::new(), std::marker::PhantomData);
        moe.visit(&mut read);
        read.1
    };
    let group = S::alone();
    let device = core::<S>(&group);
    let mut moe = cast::<S, _>(module::<Autodiff<S>>(&config(), group), dtype);
    let mut adam = AdamW::<Autodiff<S>>::new(&device, &moe, options()).unwrap();
    for step in 0..3 {
        let mut gradients = GradientsParams::new();
        for kind in ParamKind::ALL.into_iter().filter(|kind| *kind != ParamKind::SelectionBias) {
            let Some(data) = given(kind, &config(), (0, 1), step) else { continue };
            let id = read(&moe).into_iter().find(|(name, ..)| name == kind.name()).unwrap().1;
            register::<S>(&mut gradients, id, data);
        }
        // A clone shares memory with the module, of which a step may then write nothing in place.
        let (clone, before) = ((step == 1).then(|| moe.clone()), read(&moe));
        moe = adam.step(moe, gradients).unwrap();
        if let Some(clone) = clone {
            assert_eq!(read(&clone), before, "{dtype:?}");
        }
        assert!(read(&moe) != before, "{dtype:?}");
    }
    (adam.stats().unwrap().norm, read(&moe).into_iter().map(|(name, _, values)| (name, values)).collect())
}

/// Given the same gradients, a device's steps have the CPU's bits.
#[cfg(feature = "burn-cuda")]
pub fn steps_as_on_the_cpu<S: Subject + MoeBackend<Native = S>>() {
    for dtype in [DType::BF16, DType::F32] {
        let (found, expected) = (stepped::<S>(dtype), stepped::<Flex>(dtype));
        assert_eq!(found.0.to_bits(), expected.0.to_bits(), "norm, {dtype:?}");
        for ((name, found), (_, expected)) in found.1.iter().zip(&expected.1) {
            assert_eq!(found, expected, "{name}, {dtype:?}");
        }
    }
}

/// One parameter in two fields with memory of their own, as a record that is loaded leaves them.
#[derive(Module, Debug)]
struct Tied<B: MoeBackend> {
    first: Param<Tensor<B, 2>>,
    second: Param<Tensor<B, 2>>,
}

/// A step gives all fields of an id its new value, whatever memory they have.
pub fn fields_of_one_id<S: Subject + MoeBackend<Native = S>>() {
    let device = core::<S>(&S::alone());
    let before = values(90, 6, 1.0);
    let own = || tensor::<Autodiff<S>, 2>(before.clone(), [2, 3]);
    let first = Param::from_tensor(own());
    let second = Param::initialized(first.id, own().require_grad());
    let mut tied = Tied { first, second };
    let mut adam = AdamW::<Autodiff<S>>::new(&device, &tied, options()).unwrap();
    for step in 0..2 {
        let mut gradients = GradientsParams::new();
        register::<S>(&mut gradients, tied.first.id, TensorData::new(values(91 + step, 6, 1.0), [2, 3]));
        tied = adam.step(tied, gradients).unwrap();
        let [first, second] = [&tied.first, &tied.second].map(|field| floats(field.val()));
        assert!(first != before, "step {step}");
        assert_eq!(first, second, "step {step}");
    }
}

fn a_step_is_one_of_all_fields_of_an_id() {
    fields_of_one_id::<Flex>();
}

/// A run that has diverged does not spoil the one that would go on from its state.
fn a_state_that_is_not_finite_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let own = |seed| Param::from_tensor(tensor::<B, 2>(values(seed, 6, 1.0), [2, 3]));
    let tied = Tied { first: own(90), second: own(91) };
    // Without a norm no step is skipped.
    let options = AdamWOptions { max_norm: None, ..options() };
    let mut adam = AdamW::<B>::new(&Cpu::new(), &tied, options).unwrap();
    let mut gradients = GradientsParams::new();
    let gradient = vec![0.0, 0.0, 0.0, 0.0, f32::NAN, 0.0];
    register::<Flex>(&mut gradients, tied.second.id, TensorData::new(gradient, [2, 3]));
    let tied = adam.step(tied, gradients).unwrap();
    adam.save(dir.path()).unwrap();
    match adam.load(dir.path(), None, tied).unwrap_err() {
        Error::Checkpoint(CheckpointError::Tensor { tensor, found, .. }) => {
            assert!(tensor.starts_with("second.exp_avg"), "{tensor}");
            assert_eq!(found, "NaN at [1, 1]");
        }
        other => panic!("{other}"),
    }
}

/// Given the same gradients, the parameters are the same at every number of ranks, and a state that some ranks have
/// saved is gone on from by others.
fn steps_have_the_same_bits_at_every_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    // A rank's parameters; `goes_on`: from the third step, of the folder's state.
    let run = |ranks: usize, dtype: DType, goes_on: bool| {
        let comms: Vec<_> =
            ThreadWorld::create(ranks, LONG).into_iter().map(|c| std::sync::Mutex::new(Some(c))).collect();
        on_ranks(ranks, LONG, |rank, group| {
            let comm: Box<dyn Communicator<Cpu>> = Box::new(comms[rank].lock().unwrap().take().unwrap());
            let mut moe = cast::<Flex, _>(module::<B>(&config(), group), dtype);
            let mut own = AdamWParam::of_module::<B, _>(&moe);
            moe.place_shards(&mut own).unwrap();
            let mut adam = AdamW::<B>::over_ranks(&Cpu::new(), comm, &moe, own, options(), &[options().group]).unwrap();
            if goes_on {
                moe = adam.load(dir.path(), 2, moe).unwrap();
            }
            for step in if goes_on { 2..3 } else { 0..3 } {
                let mut gradients = GradientsParams::new();
                for kind in ParamKind::ALL.into_iter().filter(|kind| *kind != ParamKind::SelectionBias) {
                    let Some(data) = given(kind, &config(), (rank, ranks), step) else { continue };
                    let id = params(&moe).into_iter().find(|(name, ..)| name == kind.name()).unwrap().1;
                    register::<Flex>(&mut gradients, id, data);
                }
                moe = adam.step(moe, gradients).unwrap();
                if step == 1 && !goes_on {
                    adam.save(dir.path()).unwrap();
                }
            }
            (adam.stats().unwrap(), params(&moe))
        })
    };
    let joined = |of_ranks: &[(_, Values)]| -> Vec<(String, Vec<f32>)> {
        let names = of_ranks[0].1.iter().enumerate();
        let of = names.map(|(at, (name, ..))| {
            let parts: Vec<&Vec<f32>> = of_ranks.iter().map(|(_, params)| &params[at].2).collect();
            if !name.starts_with("experts") {
                assert!(parts.iter().all(|part| *part == parts[0]), "{name} on every rank");
                return (name.clone(), parts[0].clone());
            }
            (name.clone(), parts.into_iter().flatten().copied().collect())
        });
        of.collect()
    };
    for dtype in [DType::BF16, DType::F32] {
        let alone = run(1, dtype, false);
        let before = params(&cast::<Flex, _>(module::<B>(&config(), single()), dtype));
        assert!(alone[0].1.iter().zip(&before).all(|((.., new), (.., old))| new != old), "every parameter has moved");
        assert_eq!(alone[0].0.steps, 3);
        for ranks in [2, 4] {
            let found = run(ranks, dtype, false);
            assert_eq!(found[0].0, alone[0].0);
            assert_eq!(joined(&found), joined(&alone), "{ranks} ranks, {dtype:?}");
        }
        // f32 parameters are loaded with the model, which this one is not.
        if dtype == DType::BF16 {
            assert_eq!(joined(&run(2, dtype, true)), joined(&alone), "gone on from four ranks' state");
        }
    }
    let wrong = catch_unwind(AssertUnwindSafe(|| {
        let moe = module::<B>(&config(), single());
        let own = AdamWParam::of_module::<B, _>(&module::<B>(&config(), single()));
        AdamW::<B>::with_groups(&Cpu::new(), &moe, own, options(), &[options().group]).map(drop)
    }));
    assert!(matches!(wrong.unwrap(), Err(Error::Invalid { .. })), "parameters of another module");
}

/// A gradient that one rank alone has of what both hold: nobody steps, and the optimizers work on. A module that is not
/// the optimizer's is refused whether it has a gradient or not.
fn a_gradient_on_one_rank_alone_steps_nothing() {
    let comms: Vec<_> = ThreadWorld::create(2, LONG).into_iter().map(|c| std::sync::Mutex::new(Some(c))).collect();
    on_ranks(2, LONG, |rank, group| {
        let comm: Box<dyn Communicator<Cpu>> = Box::new(comms[rank].lock().unwrap().take().unwrap());
        let moe = module::<B>(&config(), group);
        let mut own = AdamWParam::of_module::<B, _>(&moe);
        moe.place_shards(&mut own).unwrap();
        let mut adam = AdamW::<B>::over_ranks(&Cpu::new(), comm, &moe, own, options(), &[options().group]).unwrap();
        let gradients = |without: Option<ParamKind>| {
            let mut gradients = GradientsParams::new();
            for kind in ParamKind::ALL.into_iter().filter(|kind| *kind != ParamKind::SelectionBias) {
                let Some(data) = given(kind, &config(), (rank, 2), 0).filter(|_| without != Some(kind)) else {
                    continue;
                };
                let id = params(&moe).into_iter().find(|(name, ..)| name == kind.name()).unwrap().1;
                register::<Flex>(&mut gradients, id, data);
            }
            gradients
        };
        let one = gradients((rank == 1).then_some(ParamKind::Router));
        match adam.step(moe.clone(), one) {
            Err(Error::Invalid { name, found, .. }) => {
                assert_eq!(name, format!("gradient of {}", ParamKind::Router.name()));
                assert_eq!(found, "one on rank 0, none on rank 1");
            }
            other => panic!("rank {rank}: {:?}", other.map(drop)),
        }
        // Experts are each rank's own.
        let stepped = adam.step(moe.clone(), gradients((rank == 1).then_some(ParamKind::Up))).unwrap();
        assert_eq!(adam.stats().unwrap().steps, 1);
        assert!(params(&stepped) != params(&moe));
        let other = module::<B>(&config(), single());
        let refused = adam.step(other, GradientsParams::new()).map(drop);
        let named = matches!(&refused, Err(Error::Invalid { name, .. }) if name.starts_with("parameter "));
        assert!(named || matches!(refused, Err(Error::Comm(_))), "{refused:?}");
    });
}

/// A step whose gradients hold an inf changes nothing and is counted, and scales the next loss by half.
fn a_step_that_is_skipped_changes_nothing() {
    let moe = cast::<Flex, _>(module::<B>(&config(), single()), DType::F16);
    let scaling = LossScaling::default();
    let options = AdamWOptions { loss_scaling: Some(scaling), ..options() };
    let mut adam = AdamW::<B>::new(&Cpu::new(), &moe, options).unwrap();
    let before = params(&moe);
    let mut gradients = GradientsParams::new();
    let up = before.iter().find(|(name, ..)| name == "experts.up").unwrap();
    let dims = ParamKind::Up.dims(&config(), E).unwrap();
    // As many elements in other dimensions.
    register::<Flex>(&mut gradients, up.1, TensorData::new(vec![0.0f32; up.2.len()], [up.2.len()]));
    match adam.step(moe.clone(), gradients) {
        Err(Error::Shape { tensor, expected, .. }) => {
            assert_eq!((&tensor[..], &expected[..]), ("gradient of experts.up", &dims[..]));
        }
        other => panic!("{:?}", other.map(drop)),
    }
    let mut gradients = GradientsParams::new();
    register::<Flex>(&mut gradients, up.1, TensorData::new(vec![f32::INFINITY; up.2.len()], dims));
    let moe = adam.step(moe, gradients).unwrap();
    assert_eq!(params(&moe), before);
    let stats = adam.stats().unwrap();
    assert_eq!((stats.steps, stats.skipped, stats.loss_scale), (0, 1, scaling.initial * scaling.backoff));
    let scaled = adam.scale_loss(Tensor::from_data(TensorData::new(vec![3.0f32], [1]), &device())).unwrap();
    assert_eq!(floats(scaled), [3.0 * stats.loss_scale as f32]);
}

/// Ranks that name different models save nothing, and each is told.
fn ranks_with_other_identities_save_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let comms: Vec<_> = ThreadWorld::create(2, LONG).into_iter().map(|c| std::sync::Mutex::new(Some(c))).collect();
    on_ranks(2, LONG, |rank, group| {
        let comm: Box<dyn Communicator<Cpu>> = Box::new(comms[rank].lock().unwrap().take().unwrap());
        let moe = module::<B>(&config(), group);
        let mut own = AdamWParam::of_module::<B, _>(&moe);
        moe.place_shards(&mut own).unwrap();
        let adam = AdamW::<B>::over_ranks(&Cpu::new(), comm, &moe, own, options(), &[options().group]).unwrap();
        match adam.with_identity(format!("model {rank}")).save(dir.path()) {
            Err(Error::ConfigMismatch { field, peer_value, .. }) => {
                assert_eq!((field.as_str(), peer_value), ("identity", format!("\"model {}\"", 1 - rank)));
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    });
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Three steps of three microbatches: gradients and parameters have the bits of candle's adapter.
#[cfg(feature = "candle")]
fn steps_are_those_of_candle() {
    use candle_core::{DType as Theirs, Device, Tensor as Candle};
    use candle_nn::Optimizer;
    use moebius::candle;

    for (dtype, theirs) in [(DType::F32, Theirs::F32), (DType::BF16, Theirs::BF16)] {
        let config = config();
        let mut moe = cast::<Flex, _>(module::<B>(&config, single()), dtype);
        let group = candle::DeviceGroup::single(&config, &Device::Cpu).unwrap();
        let other =
            candle::ExpertParallelMoE::from_block(block(&config, 0, 1), 3, group, candle::Parameters::Trainable);
        let vars: std::collections::HashMap<_, _> = other
            .unwrap()
            .params()
            .into_iter()
            .map(|(name, t)| (name.to_string(), candle_core::Var::from_tensor(&t.to_dtype(theirs).unwrap()).unwrap()))
            .collect();
        let tensors = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        let vb = candle_nn::VarBuilder::from_tensors(tensors, theirs, &Device::Cpu);
        let layer = moebius::layer::Layer::new(config.clone(), 3).unwrap();
        let group = candle::DeviceGroup::single(&config, &Device::Cpu).unwrap();
        let other = candle::ExpertParallelMoE::new(layer, group, vb).unwrap();

        let mut reducer =
            GradientReducer::<B>::alone(&Cpu::new()).unwrap().with_layer(&moe).with_main_gradients_in_f32();
        let mut adam = AdamW::<B>::new(&Cpu::new(), &moe, options()).unwrap();
        // In the order in which burn visits them: the norm is added up in that of the parameters.
        let order = AdamWParam::of_module::<B, _>(&moe);
        let theirs_params =
            order.iter().map(|param| candle::AdamWParam::new(param.name(), &vars[param.name()])).collect();
        let mut other_adam = candle::AdamW::with_groups(theirs_params, options(), &[options().group]).unwrap();
        let mut main = candle::MainGradients::in_f32();
        for step in 0..3 {
            for microbatch in 0..3 {
                let at = 3 * step + microbatch;
                let (x, c) = inputs(at % 2);
                let dims = [token_counts()[at % 2], H];
                reducer.backward(loss::<Flex>(&moe, at, dtype), &moe).unwrap();
                let of = |values: &[f32]| Candle::from_slice(values, &dims, &Device::Cpu).unwrap();
                let x = (of(&x) * (1.0 + at as f64)).unwrap().to_dtype(theirs).unwrap();
                let y = candle_core::Module::forward(&other, &x).unwrap();
                let loss = (y * of(&c).to_dtype(theirs).unwrap()).unwrap().to_dtype(Theirs::F32).unwrap();
                main.backward(&loss.sum_all().unwrap()).unwrap();
            }
            let gradients = reducer.reduce(&moe).unwrap();
            for (name, found_type, found) in read::<Flex>(&moe, &gradients) {
                let expected = main.get(&vars[&name]).unwrap();
                assert_eq!((found_type, expected.dtype()), (DType::F32, Theirs::F32), "{name}");
                let expected = expected.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert_eq!(found, expected, "gradient of {name}, step {step}, {dtype:?}");
            }
            moe = adam.step(moe, gradients).unwrap();
            other_adam.step(main.store()).unwrap();
            main.reset();
            assert_eq!(adam.stats().unwrap(), other_adam.stats().unwrap());
            for (name, _, found) in params(&moe) {
                let expected = vars[&name].to_dtype(Theirs::F32).unwrap().flatten_all().unwrap();
                assert_eq!(found, expected.to_vec1::<f32>().unwrap(), "{name}, step {step}, {dtype:?}");
            }
        }
    }
}

tests! {
    fn();
    sums_in_f32_are_those_of_each_microbatch,
    sums_over_ranks_beside_backward_are_those_behind_it,
    an_expert_that_goes_burns_way_once,
    a_given_gradient_is_a_losses,
    a_backward_that_fails,
    steps_have_the_same_bits_at_every_number_of_ranks,
    a_gradient_on_one_rank_alone_steps_nothing,
    a_step_that_is_skipped_changes_nothing,
    a_step_is_one_of_all_fields_of_an_id,
    a_state_that_is_not_finite_is_refused,
    ranks_with_other_identities_save_nothing,
    #[cfg(feature = "candle")]
    steps_are_those_of_candle,
}
