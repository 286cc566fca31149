//! Shards as candle's variables, under candle's optimizer.

use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
use moebius::DType;
use moebius::candle::{GradientType, VarShard, WeightVar, finish_sharded};
use moebius::cpu::Cpu;
use moebius::etp::{EtpOptions, Phase, Reduction, WeightSpec};
use moebius::optim::AdamWOptions;
use moebius::weights::WeightSource;

use super::test_ranks::{COUNT, DIMS, MINUTE, ON, holds, ranks, tensor, value};

const STEPS: usize = 3;
const LARGEST_NORM: f64 = 10.0;

/// Integers, so that sums and squares are exact in whatever order.
fn gradient(rank: usize, step: usize) -> Vec<f32> {
    (0..COUNT).map(|at| ((at * 7 + rank * 5 + step * 3) % 11) as f32 - 5.0).collect()
}

fn flat(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

fn squares(t: &Tensor) -> f64 {
    flat(t).iter().map(|v| f64::from(*v).powi(2)).sum()
}

fn optimizer(var: &Var) -> AdamW {
    AdamW::new(vec![var.clone()], ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() }).unwrap()
}

/// The gradients of a loss that has none but a variable of no account.
fn store() -> candle_core::backprop::GradStore {
    Var::zeros((), candle_core::DType::F32, &Device::Cpu).unwrap().backward().unwrap()
}

fn clipped(gradient: &Tensor, squares: f64) -> Tensor {
    (gradient * (LARGEST_NORM / squares.sqrt()).min(1.0)).unwrap()
}

#[test]
fn adamw_on_shards_is_adamw_on_the_whole() {
    // One variable, the sum of both ranks' gradients.
    let whole = Var::from_vec(value(0), &DIMS, &Device::Cpu).unwrap();
    let mut adam = optimizer(&whole);
    let mut norms = Vec::new();
    for step in 0..STEPS {
        let sum: Vec<f32> = gradient(0, step).iter().zip(gradient(1, step)).map(|(a, b)| a + b).collect();
        let sum = Tensor::from_vec(sum, &DIMS, &Device::Cpu).unwrap();
        norms.push(squares(&sum));
        let mut gradients = store();
        gradients.insert(&whole, clipped(&sum, norms[step]));
        adam.step(&gradients).unwrap();
    }
    assert!(norms.iter().any(|n| n.sqrt() > LARGEST_NORM), "clipped somewhere: {norms:?}");
    let expected = flat(&whole);
    assert_ne!(expected, value(0));

    let squares_of_shards = std::sync::Mutex::new(vec![0.0; STEPS]);
    let met = std::sync::Barrier::new(2);
    ranks(&Cpu::poisoning(), 2, MINUTE, |rank, place| {
        let chain = place.chain(ON).unwrap();
        let cut = chain.shards(&DIMS).unwrap();
        let shard = cut.cut(&Cpu::new(), tensor(value(0)).view(), rank).unwrap();
        let var = Var::from_slice(shard.as_slice::<f32>().unwrap(), &cut.shard_dims(), &Device::Cpu).unwrap();
        let spec = WeightSpec::new("w", 0, &DIMS, DType::F32);
        let id = chain.add(spec, Arc::new(VarShard::new(&var))).unwrap();
        let mut adam = optimizer(&var);
        for (step, norm) in norms.iter().enumerate() {
            chain.begin(Phase::Forward).unwrap();
            drop(chain.source(id).unwrap().acquire().unwrap());
            chain.end().unwrap();
            let mut buffer = chain.gradient_buffer(id).unwrap();
            let own = gradient(rank, step);
            buffer.view_mut().unwrap().into_data().copy_from_slice(bytemuck::cast_slice(&own));
            chain.submit(buffer).unwrap();
            let mut gradients = store();
            finish_sharded(
                &chain,
                None,
                &[WeightVar { id, var: var.clone() }],
                &mut gradients,
                GradientType::InVariableType,
            )
            .unwrap();
            let own = gradients.get(&var).unwrap().clone();
            squares_of_shards.lock().unwrap()[step] += squares(&own);
            // Clipping by the global norm needs the squares of all shards.
            met.wait();
            let all = squares_of_shards.lock().unwrap()[step];
            assert_eq!(all, *norm, "padding adds nothing");
            gradients.insert(&var, clipped(&own, all));
            adam.step(&gradients).unwrap();
        }
        chain.begin(Phase::Forward).unwrap();
        holds(&Cpu::new(), &chain.source(id).unwrap().acquire().unwrap(), &expected);
        chain.end().unwrap();
    });
}

/// 1 and 2⁻⁹ are numbers of bf16, and their sum is not: it reaches this crate's optimizer in f32, and candle-nn's, whose
/// variables want their own type, rounded.
#[test]
fn sums_of_bf16_gradients_stay_in_f32() {
    ranks(&Cpu::poisoning(), 2, MINUTE, |rank, place| {
        let chain = place.chain(EtpOptions { reduction: Reduction::Pairwise, ..ON }).unwrap();
        let dims = chain.shards(&DIMS).unwrap().shard_dims();
        let var = Var::zeros(&dims, candle_core::DType::BF16, &Device::Cpu).unwrap();
        let spec = WeightSpec::new("w", 0, &DIMS, DType::BF16);
        let id = chain.add(spec, Arc::new(VarShard::new(&var))).unwrap();
        let own = half::bf16::from_f32([1.0, 2f32.powi(-9)][rank]);
        for in_f32 in [true, false] {
            chain.begin(Phase::Forward).unwrap();
            drop(chain.source(id).unwrap().acquire().unwrap());
            chain.end().unwrap();
            let mut buffer = chain.gradient_buffer(id).unwrap();
            buffer.view_mut().unwrap().into_data().copy_from_slice(bytemuck::cast_slice(&[own; COUNT]));
            chain.submit(buffer).unwrap();
            let mut gradients = store();
            let vars = [WeightVar { id, var: var.clone() }];
            let of = if in_f32 { GradientType::AsSummed } else { GradientType::InVariableType };
            finish_sharded(&chain, None, &vars, &mut gradients, of).unwrap();
            let gradient = gradients.get(&var).unwrap();
            let (dtype, expected) = match in_f32 {
                true => (candle_core::DType::F32, 1.0 + 2f32.powi(-9)),
                false => (candle_core::DType::BF16, 1.0),
            };
            assert_eq!(gradient.dtype(), dtype);
            let values = flat(&gradient.to_dtype(candle_core::DType::F32).unwrap());
            assert!(values.iter().all(|v| *v == expected || *v == 0.0) && values[0] == expected, "{values:?}");
            let options = AdamWOptions::default();
            moebius::candle::AdamW::new(vec![var.clone()], options).unwrap().step(&gradients).unwrap();
        }
    });
}

/// A chain keeps a shard's gradient: variables that a shard is computed from would get none.
#[test]
fn a_computed_shard_is_refused() {
    use candle_nn::VarBuilder;
    use moebius::MoeConfig;
    use moebius::candle::{EpGroup, ExpertParallelMoE, error_of};
    use moebius::comm::Solo;
    use moebius::etp::{Chain, Comms, Payload};
    use moebius::layer::ParamKind;

    let config = MoeConfig::new(4, 8, 2, 1);
    let comms = Comms::<Cpu> { gather: Box::new(Solo::new(Cpu::new())), reduce: Box::new(Solo::new(Cpu::new())) };
    let chain = Arc::new(Chain::new(Cpu::new(), comms, EtpOptions::default()).unwrap());
    let module = |computed: Option<ParamKind>| {
        let roles = [ParamKind::Router, ParamKind::Up, ParamKind::Down].into_iter();
        let tensors = roles.map(|role| {
            let mut dims = role.dims(&config, 2).unwrap();
            if role != ParamKind::Router {
                dims = chain.shards(&dims).unwrap().shard_dims().to_vec();
            }
            let var = Var::ones(dims, candle_core::DType::F32, &Device::Cpu).unwrap();
            let half = || (var.as_tensor() * 0.5).unwrap();
            (role.name().to_string(), if computed == Some(role) { half() } else { var.as_tensor().clone() })
        });
        let vb = VarBuilder::from_tensors(tensors.collect(), candle_core::DType::F32, &Device::Cpu);
        let group = EpGroup::single(&config).unwrap();
        ExpertParallelMoE::sharded(config.clone(), group, &chain, Payload::Plain, vb)
    };
    for role in [ParamKind::Up, ParamKind::Down] {
        let error = module(Some(role)).unwrap_err();
        match error_of(&error) {
            Some(moebius::Error::Invalid { name, found, .. }) => {
                assert_eq!((&name[..], &found[..]), (role.name(), "a computed shard"));
            }
            other => panic!("{other:?}"),
        }
    }
    // Neither shard of a refused module has been added.
    module(None).unwrap();
}
