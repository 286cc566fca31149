//! Sums of gradients over ranks: of a model's own parameters in several types, in buckets of any size.

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use moebius::burn::{DeviceGroup, ReduceOptions, reduce_gradients, reduce_gradients_over};
use moebius::cpu::Cpu;

use super::support::*;
use crate::trials::tests;

type Inner = burn::backend::Flex;

/// Parameters of several types, one that is left out, and one that is constant.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    single: Param<Tensor<B, 2>>,
    absent: Param<Tensor<B, 1>>,
    /// Only the first rank has a gradient of it.
    of_one_rank: Param<Tensor<B, 1>>,
    half: Vec<Param<Tensor<B, 3>>>,
    double: Param<Tensor<B, 1>>,
    own: Param<Tensor<B, 2>>,
    constant: Param<Tensor<B, 1>>,
    last: Param<Tensor<B, 2>>,
}

fn param<const D: usize>(dims: [usize; D], dtype: DType) -> Param<Tensor<B, D>> {
    Param::from_tensor(Tensor::zeros(dims, (&device(), dtype)))
}

impl Model<B> {
    fn new(rows: usize) -> Self {
        Self {
            single: param([rows, 4], DType::F32),
            absent: param([5], DType::F32),
            of_one_rank: param([2], DType::BF16),
            half: vec![param([7, 1, 2], DType::BF16), param([2, 3, 3], DType::F16)],
            double: param([3], DType::F64),
            own: param([2, 2], DType::F32),
            constant: param([2], DType::F32).set_require_grad(false),
            last: param([2, 2], DType::F32),
        }
    }
}

/// A gradient of a parameter on a rank.
fn give<const D: usize>(gradients: &mut GradientsParams, seed: u64, param: &Param<Tensor<B, D>>) -> Vec<f64> {
    let data = TensorData::new(values(seed, param.dims().iter().product(), 1.0), param.dims());
    let gradient = Tensor::<Inner, D>::from_data(data.convert_dtype(param.dtype()), (&device(), param.dtype()));
    gradients.register(param.id, gradient.clone());
    gradient.into_data().iter::<f64>().collect()
}

fn get<const D: usize>(gradients: &GradientsParams, param: &Param<Tensor<B, D>>) -> Option<Vec<f64>> {
    let gradient = gradients.get::<Inner, D>(param.id)?;
    assert_eq!((gradient.dtype(), gradient.dims()), (param.dtype(), param.dims()));
    Some(gradient.into_data().iter::<f64>().collect())
}

/// Rounds values to a type.
fn rounded(values: Vec<f64>, dtype: DType) -> Vec<f64> {
    let count = values.len();
    TensorData::new(values, [count]).convert_dtype(dtype).iter::<f64>().collect()
}

fn gradients_of_a_model_are_summed_in_buckets() {
    let of_one_rank = |model: &Model<B>, gradients: &mut GradientsParams| give(gradients, 79, &model.of_one_rank);
    const TYPES: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::F64, DType::F32];
    let run = |count: usize, bytes: usize| {
        let results = on_ranks(count, LONG, |rank, group| {
            let model = Model::new(3);
            let mut gradients = GradientsParams::new();
            let of = |at: u64| 80 + 10 * rank as u64 + at;
            let mut own = vec![give(&mut gradients, of(0), &model.single)];
            own.extend(model.half.iter().zip(1..).map(|(half, at)| give(&mut gradients, of(at), half)));
            own.push(give(&mut gradients, of(3), &model.double));
            own.push(give(&mut gradients, of(4), &model.last));
            let kept = give(&mut gradients, of(5), &model.own);
            if rank == 0 {
                of_one_rank(&model, &mut gradients);
            }
            let except = [model.own.id];
            let options = ReduceOptions { bucket_bytes: bytes, ..ReduceOptions::except(&except) };
            let mut group = group.lock();
            let comm = group.dispatcher().communicator();
            reduce_gradients_over(comm, &Cpu::new(), &model, options, &mut gradients).unwrap();
            assert_eq!(get(&gradients, &model.own), Some(kept), "left out");
            assert_eq!(get(&gradients, &model.constant), None);
            assert_eq!(get(&gradients, &model.absent), None);
            if rank == 0 || count > 1 {
                assert_eq!(get(&gradients, &model.of_one_rank), Some(of_one_rank(&model, &mut GradientsParams::new())));
            }
            let half = model.half.iter().map(|half| get(&gradients, half));
            let sums = std::iter::once(get(&gradients, &model.single)).chain(half);
            let sums = sums.chain([get(&gradients, &model.double), get(&gradients, &model.last)]);
            (own, sums.map(Option::unwrap).collect::<Vec<_>>())
        });
        for (at, dtype) in TYPES.into_iter().enumerate() {
            // Sums in rank order, in f32 but for f64, rounded once to the gradient's type.
            let sum = |i: usize| {
                let terms = results.iter().map(|(own, _)| own[at][i]);
                match dtype {
                    DType::F64 => terms.reduce(|a, b| a + b).unwrap(),
                    _ => f64::from(terms.map(|v| v as f32).reduce(|a, b| a + b).unwrap()),
                }
            };
            let expected = rounded((0..results[0].0[at].len()).map(sum).collect(), dtype);
            for (rank, (_, sums)) in results.iter().enumerate() {
                assert_eq!(sums[at], expected, "{dtype:?} on rank {rank} of {count}, buckets of {bytes} bytes");
            }
        }
    };
    for count in [1, 2, 4] {
        for bytes in [0, 40, 100, usize::MAX] {
            run(count, bytes);
        }
    }
}

fn gradients_that_do_not_fit_are_errors_on_every_rank() {
    let results = on_ranks(2, LONG, |rank, group| {
        let group = DeviceGroup::from(group);
        let errors = |single: [usize; 2], wrong: bool| {
            let (mut model, mut gradients) = (Model::new(3), GradientsParams::new());
            model.single = param(single, DType::F32);
            if wrong {
                let other = Tensor::<Inner, 2>::zeros([4, 3], &device());
                gradients.register(model.single.id, other);
            }
            reduce_gradients(&group, &model, ReduceOptions::default(), &mut gradients).err().map(|e| e.to_string())
        };
        // Another size on the second rank, and another of as many elements; a gradient that is not its parameter's on the
        // first.
        let sizes = [[[3, 4], [4, 4]], [[3, 4], [4, 3]]].map(|single| errors(single[rank], false));
        let shape = errors([3, 4], rank == 0);
        assert_eq!(errors([3, 4], false), None, "the group works on");
        (sizes, shape)
    });
    for (sizes, shape) in results {
        for error in sizes {
            assert!(error.as_ref().is_some_and(|e| e.contains("variables")), "{error:?}");
        }
        assert!(shape.as_ref().is_some_and(|e| e.contains("gradient") && e.contains("[4, 3]")), "{shape:?}");
    }
}

/// A gradient in f32 beside a parameter in bf16 has that type on the ranks too that had none.
fn an_absent_gradient_has_the_other_ranks_type() {
    let sums = on_ranks(2, LONG, |rank, group| {
        let (group, model) = (DeviceGroup::from(group), Model::new(3));
        let mut gradients = GradientsParams::new();
        let [half, other] = [&model.half[0], &model.half[1]];
        if rank == 0 {
            let values = TensorData::new(values(97, 14, 1.0), half.dims());
            gradients.register(half.id, Tensor::<Inner, 3>::from_data(values, (&device(), DType::F32)));
            give(&mut gradients, 98, other);
        }
        reduce_gradients(&group, &model, ReduceOptions::default(), &mut gradients).unwrap();
        [half, other].map(|param| {
            let sum = gradients.get::<Inner, 3>(param.id).unwrap();
            (sum.dtype(), sum.into_data().iter::<f64>().collect::<Vec<_>>())
        })
    });
    assert_eq!(sums[0].each_ref().map(|(dtype, _)| *dtype), [DType::F32, DType::F16]);
    assert_eq!(sums[0], sums[1]);
}

/// Of the parameters that are named, those that are not left out.
fn named_gradients_alone_are_summed() {
    on_ranks(2, LONG, |rank, group| {
        let (group, model) = (DeviceGroup::from(group), Model::new(3));
        let mut gradients = GradientsParams::new();
        let single = give(&mut gradients, 90 + rank as u64, &model.single);
        let own = give(&mut gradients, 92 + rank as u64, &model.own);
        give(&mut gradients, 94 + rank as u64, &model.last);
        let of = |rank: u64| values(94 + rank, 4, 1.0);
        let sum: Vec<f64> = of(0).iter().zip(of(1)).map(|(a, b)| f64::from(a + b)).collect();
        let (only, except) = ([model.last.id, model.own.id], [model.own.id]);
        let options = ReduceOptions { except: &except, ..ReduceOptions::only(&only) };
        reduce_gradients(&group, &model, options, &mut gradients).unwrap();
        assert_eq!(get(&gradients, &model.last), Some(sum));
        assert_eq!((get(&gradients, &model.single), get(&gradients, &model.own)), (Some(single), Some(own)));
        assert_eq!(get(&gradients, &model.absent), None);
    });
}

/// The sums of a layer's replicated parameters, over a model's `reduce_gradients` and over the layer's own.
pub fn of_a_layer<S: Subject>(ranks: usize) {
    let config = config();
    let found = S::on_ranks(ranks, |rank, group| {
        let model = module::<Autodiff<S>>(&config, &group);
        let y = model.forward(tensor::<Autodiff<S>, 2>(inputs(rank).0, [token_counts()[rank], H])).unwrap();
        let all = y.powi_scalar(2).sum().backward();
        let own = [&model.router.weight, &model.shared.as_ref().unwrap().up].map(|p| floats(p.grad(&all).unwrap()));
        let experts = floats(model.experts.up.grad(&all).unwrap());
        let given = || {
            let mut gradients = GradientsParams::new();
            let replicated = [&model.router.weight, &model.shared.as_ref().unwrap().up];
            for p in replicated {
                gradients.register::<S, 2>(p.id, p.grad(&all).unwrap());
            }
            gradients.register::<S, 3>(model.experts.up.id, model.experts.up.grad(&all).unwrap());
            gradients
        };
        let (mut of_layer, mut of_model) = (given(), given());
        model.reduce_gradients(&mut of_layer).unwrap();
        let except = model.expert_ids();
        reduce_gradients(&group, &model, ReduceOptions::except(&except), &mut of_model).unwrap();
        let sums = |gradients: &GradientsParams| {
            assert_eq!(floats(gradients.get::<S, 3>(model.experts.up.id).unwrap()), experts);
            let replicated = [&model.router.weight, &model.shared.as_ref().unwrap().up];
            replicated.map(|p| floats(gradients.get::<S, 2>(p.id).unwrap()))
        };
        let found = sums(&of_layer);
        assert_eq!(found, sums(&of_model));
        (own, found)
    });
    for at in 0..2 {
        // NCCL adds in an order of its own: a rounding of 2⁻²⁴ an addition, of the magnitudes' sum.
        for (i, found_sum) in found[0].1[at].iter().enumerate() {
            let terms = || found.iter().map(|(own, _)| f64::from(own[at][i]));
            let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let bound = ranks as f64 * size / f64::from(1u32 << 24);
            assert!((f64::from(*found_sum) - sum).abs() <= bound, "{ranks} ranks: {found_sum} for {sum}");
        }
        assert!(found.windows(2).all(|pair| pair[0].1[at] == pair[1].1[at]), "the same on all ranks");
    }
}

fn gradients_of_a_layer_are_summed_over_the_ranks() {
    for ranks in RANKS {
        of_a_layer::<burn::backend::Flex>(ranks);
    }
}

tests! {
    fn();
    gradients_of_a_layer_are_summed_over_the_ranks,
    gradients_of_a_model_are_summed_in_buckets,
    gradients_that_do_not_fit_are_errors_on_every_rank,
    an_absent_gradient_has_the_other_ranks_type,
    named_gradients_alone_are_summed,
}
