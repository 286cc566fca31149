//! Steps of the optimizer of main weights.

use super::super::sharded::{Mesh, Meshed, Place, on_mesh};
use super::*;

fn options() -> AdamWOptions {
    let group = GroupOptions { lr: 0.01, ..GroupOptions::default() };
    AdamWOptions { group, max_norm: Some(0.5), ..AdamWOptions::default() }
}

struct ReadParams<S> {
    path: Vec<String>,
    found: Values,
    back_end: PhantomData<S>,
}

impl<S: Subject> ModuleVisitor<Autodiff<S>> for ReadParams<S> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<S>, D>>) {
        self.found.push((self.path.join("."), param.id, floats(param.val())));
    }
}

/// Parameters by path, as f32.
fn params<S: Subject>(module: &impl Module<Autodiff<S>>) -> Values {
    let mut read = ReadParams::<S> { path: Vec::new(), found: Vec::new(), back_end: PhantomData };
    module.visit(&mut read);
    read.found
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

/// The gradients that a rank is given for a step, without that of `without`.
fn all_given<S: Subject>(
    moe: &ExpertParallelMoE<Autodiff<S>>,
    place: (usize, usize),
    step: u64,
    without: Option<ParamKind>,
) -> GradientsParams {
    let (mut gradients, params) = (GradientsParams::new(), params::<S>(moe));
    for kind in ParamKind::ALL {
        if kind == ParamKind::SelectionBias || Some(kind) == without {
            continue;
        }
        let Some(data) = given(kind, &config(), place, step) else { continue };
        let (_, id, _) = params.iter().find(|(name, ..)| name == kind.name()).unwrap();
        register::<S>(&mut gradients, *id, data);
    }
    gradients
}

/// Parameters after three steps of given gradients, with their gradients' norm.
#[cfg(feature = "burn-cuda")]
fn stepped<S: Subject + MoeBackend<Native = S>>(dtype: DType) -> (f64, Vec<(String, Vec<f32>)>) {
    let group = S::alone();
    let device = core::<S>(&group);
    let mut moe = cast::<S, _>(module::<Autodiff<S>>(&config(), group), dtype);
    let mut adam = AdamW::<Autodiff<S>>::new(&device, &moe, options()).unwrap();
    for step in 0..3 {
        let gradients = all_given::<S>(&moe, (0, 1), step, None);
        // A clone shares memory with the module, of which a step may then write nothing in place.
        let (clone, before) = ((step == 1).then(|| moe.clone()), params::<S>(&moe));
        moe = adam.step(moe, gradients).unwrap();
        if let Some(clone) = clone {
            assert_eq!(params::<S>(&clone), before, "{dtype:?}");
        }
        assert!(params::<S>(&moe) != before, "{dtype:?}");
    }
    (adam.stats().unwrap().norm, params::<S>(&moe).into_iter().map(|(name, _, values)| (name, values)).collect())
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

/// An optimizer over a mesh's ranks, of a layer whose experts they divide.
fn over_ranks<S: Meshed>(place: Place<S>, dtype: DType) -> (ExpertParallelMoE<Autodiff<S>>, AdamW<Autodiff<S>>) {
    let Place { group, world, .. } = place;
    let device = core::<S>(&group);
    let moe = cast::<S, _>(module::<Autodiff<S>>(&config(), group), dtype);
    let mut own = AdamWParam::of_module::<Autodiff<S>, _>(&moe);
    moe.place_shards(&mut own).unwrap();
    let adam = AdamW::over_ranks(&device, world, &moe, own, options(), &[options().group]).unwrap();
    (moe, adam)
}

/// Given the same gradients, the parameters are the same at every number of ranks, and a state that some ranks have
/// saved is gone on from by others.
pub fn same_bits_over_ranks<S: Meshed>(numbers: &[usize]) {
    let dir = tempfile::tempdir().unwrap();
    // A rank's parameters; `goes_on`: from the third step, of the folder's state.
    let run = |ranks: usize, dtype: DType, goes_on: bool| {
        on_mesh(Mesh { world: ranks, ep: ranks }, false, |place: Place<S>| {
            let rank = place.rank;
            let (mut moe, mut adam) = over_ranks(place, dtype);
            if goes_on {
                moe = adam.load(dir.path(), 2, moe).unwrap();
            }
            for step in if goes_on { 2..3 } else { 0..3 } {
                let gradients = all_given::<S>(&moe, (rank, ranks), step, None);
                moe = adam.step(moe, gradients).unwrap();
                if step == 1 && !goes_on {
                    adam.save(dir.path()).unwrap();
                }
            }
            (adam.stats().unwrap(), params::<S>(&moe))
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
        let before = params::<S>(&cast::<S, _>(module::<Autodiff<S>>(&config(), S::alone()), dtype));
        assert!(alone[0].1.iter().zip(&before).all(|((.., new), (.., old))| new != old), "every parameter has moved");
        assert_eq!(alone[0].0.steps, 3);
        for &ranks in numbers {
            let found = run(ranks, dtype, false);
            assert_eq!(found[0].0, alone[0].0);
            assert_eq!(joined(&found), joined(&alone), "{ranks} ranks, {dtype:?}");
        }
        // f32 parameters are loaded with the model, which this one is not.
        if dtype == DType::BF16 {
            for ranks in [1, numbers[0]] {
                assert_eq!(
                    joined(&run(ranks, dtype, true)),
                    joined(&alone),
                    "{ranks} ranks go on from the last's state"
                );
            }
        }
    }
}

fn steps_have_the_same_bits_at_every_number_of_ranks() {
    same_bits_over_ranks::<Flex>(&[2, 4]);
}

fn parameters_of_another_module_are_refused() {
    let wrong = catch_unwind(AssertUnwindSafe(|| {
        let moe = module::<B>(&config(), single());
        let own = AdamWParam::of_module::<B, _>(&module::<B>(&config(), single()));
        AdamW::<B>::with_groups(&Cpu::new(), &moe, own, options(), &[options().group]).map(drop)
    }));
    assert!(matches!(wrong.unwrap(), Err(Error::Invalid { .. })), "parameters of another module");
}

/// A gradient that one rank alone has of what all hold: nobody steps, and the optimizers work on. A module that is not
/// the optimizer's is refused whether it has a gradient or not.
pub fn gradient_on_one_rank<S: Meshed>(ranks: usize) {
    on_mesh(Mesh { world: ranks, ep: ranks }, false, |place: Place<S>| {
        let (rank, group) = (place.rank, place.group.clone());
        let (moe, mut adam) = over_ranks(place, DType::F32);
        let last = rank + 1 == ranks;
        let gradients = |without: ParamKind| all_given::<S>(&moe, (rank, ranks), 0, last.then_some(without));
        match adam.step(moe.clone(), gradients(ParamKind::Router)) {
            Err(Error::Invalid { name, found, .. }) => {
                assert_eq!(name, format!("gradient of {}", ParamKind::Router.name()));
                assert_eq!(found, format!("one on rank 0, none on rank {}", ranks - 1));
            }
            other => panic!("rank {rank}: {:?}", other.map(drop)),
        }
        // Experts are each rank's own.
        let stepped = adam.step(moe.clone(), gradients(ParamKind::Up)).unwrap();
        assert_eq!(adam.stats().unwrap().steps, 1);
        assert!(params::<S>(&stepped) != params::<S>(&moe));
        let other = module::<Autodiff<S>>(&config(), group);
        let refused = adam.step(other, GradientsParams::new()).map(drop);
        let named = matches!(&refused, Err(Error::Invalid { name, .. }) if name.starts_with("parameter "));
        assert!(named || matches!(refused, Err(Error::Comm(_))), "{refused:?}");
    });
}

fn a_gradient_on_one_rank_alone_steps_nothing() {
    gradient_on_one_rank::<Flex>(2);
}

/// A step whose gradients hold an inf changes nothing and is counted, and scales the next loss by half.
fn a_step_that_is_skipped_changes_nothing() {
    let moe = cast::<Flex, _>(module::<B>(&config(), single()), DType::F16);
    let scaling = LossScaling::default();
    let options = AdamWOptions { loss_scaling: Some(scaling), ..options() };
    let mut adam = AdamW::<B>::new(&Cpu::new(), &moe, options).unwrap();
    let before = params::<Flex>(&moe);
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
    assert_eq!(params::<Flex>(&moe), before);
    let stats = adam.stats().unwrap();
    assert_eq!((stats.steps, stats.skipped, stats.loss_scale), (0, 1, scaling.initial * scaling.backoff));
    let scaled = adam.scale_loss(Tensor::from_data(TensorData::new(vec![3.0f32], [1]), &device())).unwrap();
    assert_eq!(floats(scaled), [3.0 * stats.loss_scale as f32]);
}

/// Ranks that name different models save nothing, and each is told.
fn ranks_with_other_identities_save_nothing() {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(Mesh { world: 2, ep: 2 }, false, |place: Place<Flex>| {
        let rank = place.rank;
        let (_, adam) = over_ranks(place, DType::F32);
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
            for (name, _, found) in params::<Flex>(&moe) {
                let expected = vars[&name].to_dtype(Theirs::F32).unwrap().flatten_all().unwrap();
                assert_eq!(found, expected.to_vec1::<f32>().unwrap(), "{name}, step {step}, {dtype:?}");
            }
        }
    }
}

tests! {
    fn();
    steps_have_the_same_bits_at_every_number_of_ranks,
    parameters_of_another_module_are_refused,
    a_gradient_on_one_rank_alone_steps_nothing,
    a_step_that_is_skipped_changes_nothing,
    a_step_is_one_of_all_fields_of_an_id,
    a_state_that_is_not_finite_is_refused,
    ranks_with_other_identities_save_nothing,
    #[cfg(feature = "candle")]
    steps_are_those_of_candle,
}
