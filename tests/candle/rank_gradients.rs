//! Main gradients on several ranks: against candle's own, and where a rank fails or does something else.

use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor, Var};
use candle_nn::Optimizer;
use candle_nn::VarBuilder;
use moebius::candle::{
    AdamW, AdamWParam, DispatchCombine, EpGroup, ExpertParallelMoE, MainGradients, backward, error_of,
    reduce_gradients, reduce_gradients_over, refuse_backward,
};
use moebius::comm::Communicator;
use moebius::config::SharedConfig;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::layer::{Layer, ParamKind};
use moebius::optim::{AdamWOptions, GroupOptions, ParamShard};
use moebius::{CommError, Error, MoeConfig};

use crate::ranks::ranks;
use crate::support::{AnyResult, EXPERTS, H, config, flat, of_type, wide_tokens};
use crate::trials::tests;

/// The rank that fails.
const CULPRIT: usize = 1;
/// Long enough for a loaded machine; no test waits for it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Tokens of the ranks, by their number: the last has none.
const CUTS: [&[usize]; 3] = [&[0, 13], &[0, 5, 13], &[0, 6, 7, 13, 13]];

fn full() -> MoeConfig {
    let mut full = config();
    full.shared = Some(SharedConfig { intermediate: 8, gated: true, bias: true });
    (full.expert_bias, full.router.logit_bias) = (true, true);
    full
}

/// The same values, whose backward fails where it is told to.
struct Failing(bool);

impl CustomOp1 for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((candle_core::backend::BackendStorage::try_clone(x, layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if self.0 { candle_core::bail!("an operation of the user's own") } else { Ok(Some(gradient.clone())) }
    }
}

/// Where a rank's backward fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Nowhere,
    BeforeAnyLayer,
    BetweenLayers,
}

/// Two layers, the second of which shares what `shared` names with the first, among ordinary operations.
struct Model {
    layers: [ExpertParallelMoE; 2],
}

impl Model {
    fn new(group: &EpGroup, dtype: DType, shared: &[ParamKind]) -> AnyResult<Self> {
        let first = of_type(group.clone(), full(), dtype)?;
        let tensors = first.params().into_iter().map(|(name, t)| {
            let is_shared = shared.iter().any(|kind| kind.name() == name);
            let own = if is_shared { t.clone() } else { Var::from_tensor(&(t * 0.5)?)?.into_inner() };
            Ok((name.to_string(), own))
        });
        let vb = VarBuilder::from_tensors(tensors.collect::<AnyResult<_>>()?, dtype, &Device::Cpu);
        let second = ExpertParallelMoE::new(Layer::new(full(), 4)?, group.clone(), vb)?;
        Ok(Self { layers: [first, second] })
    }

    fn loss(&self, x: &Tensor, fault: Fault) -> AnyResult<Tensor> {
        let [first, second] = &self.layers;
        let hidden = (first.forward(x)? + x)?.apply_op1(Failing(fault == Fault::BetweenLayers))?;
        let y = (second.forward(&hidden)? + hidden)?.apply_op1(Failing(fault == Fault::BeforeAnyLayer))?;
        Ok(y.to_dtype(DType::F32)?.sqr()?.sum_all()?)
    }

    /// Variables of both layers, each once.
    fn vars(&self) -> Vec<Var> {
        let mut all: Vec<Var> = Vec::new();
        for var in self.layers.iter().flat_map(ExpertParallelMoE::vars) {
            if !all.iter().any(|other| other.id() == var.id()) {
                all.push(var);
            }
        }
        all
    }

    fn values(&self, gradients: &GradStore) -> AnyResult<Vec<Vec<f32>>> {
        let of = |var: &Var| flat(gradients.get(var).ok_or("no gradient")?);
        self.vars().iter().map(of).collect()
    }
}

/// A rank's tokens of a microbatch.
fn tokens(group: &EpGroup, microbatch: usize, dtype: DType) -> AnyResult<Var> {
    let cuts = CUTS[group.ranks() / 2];
    let (rank, start) = (group.rank(), 20 * microbatch);
    wide_tokens(start + cuts[rank]..start + cuts[rank + 1], H, dtype, &Device::Cpu)
}

/// The culprit's own error, and the others', which name it.
fn check_errors(group: &EpGroup, error: &candle_core::Error) {
    match (group.rank() == CULPRIT, error_of(error)) {
        (true, found) => assert!(found.is_none() && error.to_string().contains("of the user's own"), "{error}"),
        (false, Some(Error::Peer { peer: CULPRIT, rank, reason, .. })) => {
            assert_eq!(*rank, group.rank());
            assert!(reason.contains("of the user's own"), "{reason}");
        }
        (false, found) => panic!("rank {}: {found:?}, {error}", group.rank()),
    }
}

fn main_gradients_are_candles_on_any_number_of_ranks() -> AnyResult<()> {
    for count in [1, 2, 4] {
        for dtype in [DType::F32, DType::F64] {
            ranks(count, TIMEOUT, |group| {
                let model = Model::new(&group, dtype, &[])?;
                let x = tokens(&group, 0, dtype)?;
                let expected = model.loss(&x, Fault::Nowhere)?.backward()?;
                let mut main = MainGradients::new();
                main.backward(&model.loss(&x, Fault::Nowhere)?)?;
                // Each variable has one term: the same bits, but for 0 and −0.
                assert_eq!(model.values(main.store())?, model.values(&expected)?);
                assert_eq!(flat(main.get(&x)?)?, flat(expected.get(&x).ok_or("no gradient of x")?)?);
                Ok(())
            })
            .into_iter()
            .collect::<AnyResult<Vec<_>>>()?;
        }
    }
    Ok(())
}

/// Microbatches summed here, against a store each that is summed afterwards in the same order and type.
fn microbatches_of_ranks_are_summed_as_candles() -> AnyResult<()> {
    for count in [1, 2, 4] {
        for shared in [&[][..], &[ParamKind::Up, ParamKind::Router][..]] {
            ranks(count, TIMEOUT, |group| {
                let model = Model::new(&group, DType::F32, shared)?;
                let mut main = MainGradients::new();
                let mut sums: Option<Vec<Vec<f32>>> = None;
                for microbatch in 0..3 {
                    let x = tokens(&group, microbatch, DType::F32)?;
                    main.backward(&model.loss(&x, Fault::Nowhere)?)?;
                    let own = model.values(&model.loss(&x, Fault::Nowhere)?.backward()?)?;
                    sums = Some(match sums {
                        None => own,
                        Some(sums) => {
                            let add = |(a, b): (Vec<f32>, Vec<f32>)| a.iter().zip(&b).map(|(a, b)| a + b).collect();
                            sums.into_iter().zip(own).map(add).collect()
                        }
                    });
                }
                let (found, sums) = (model.values(main.store())?, sums.ok_or("no microbatch")?);
                for (found, expected) in found.iter().zip(&sums) {
                    match shared.is_empty() {
                        true => assert_eq!(found, expected),
                        // Six terms of a shared variable, in two orders: of each sum 5 roundings of 2⁻²⁴ of what is
                        // added up, which is at most the terms' absolute values; `close` allows 1e-5 of the norm.
                        false => crate::support::close("a shared variable", found, expected),
                    }
                }
                Ok(())
            })
            .into_iter()
            .collect::<AnyResult<Vec<_>>>()?;
        }
    }
    Ok(())
}

fn a_backward_that_fails_before_a_layer_is_told() -> AnyResult<()> {
    for (count, fault) in [2, 4].into_iter().flat_map(|n| [(n, Fault::BeforeAnyLayer), (n, Fault::BetweenLayers)]) {
        ranks(count, TIMEOUT, |group| {
            let model = Model::new(&group, DType::F32, &[])?;
            let [x, next] = [tokens(&group, 0, DType::F32)?, tokens(&group, 1, DType::F32)?];
            let mut twice = MainGradients::new();
            for x in [&x, &next] {
                twice.backward(&model.loss(x, Fault::Nowhere)?)?;
            }
            let expected = model.values(twice.store())?;

            let own = if group.rank() == CULPRIT { fault } else { Fault::Nowhere };
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Fault::Nowhere)?)?;
            let once = model.values(main.store())?;
            let failed = model.loss(&next, own)?;
            check_errors(&group, &main.backward(&failed).expect_err("a backward that fails"));
            match fault {
                // Nothing had been written: the step goes on where it was.
                Fault::BeforeAnyLayer => assert_eq!(model.values(main.store())?, once),
                // The second layer had added its gradients: on every rank the step begins anew.
                _ => {
                    assert!(main.get(&model.vars()[0]).is_err());
                    main.backward(&model.loss(&x, Fault::Nowhere)?)?;
                }
            }
            main.backward(&model.loss(&next, Fault::Nowhere)?)?;
            assert_eq!(model.values(main.store())?, expected);

            // The same of one backward alone, and of candle's own, whose failure the rank tells itself.
            check_errors(&group, &backward(&model.loss(&next, own)?).expect_err("a backward that fails"));
            let loss = model.loss(&next, own)?;
            let error = loss.backward().expect_err("a backward that fails");
            refuse_backward(&loss, &error.to_string());
            check_errors(&group, &error);
            // A model that has no loss to give.
            let loss = model.loss(&next, Fault::Nowhere)?;
            match group.rank() == CULPRIT {
                true => model.layers[1].refuse_backward("a loss of the user's own"),
                false => check_errors(&group, &loss.backward().expect_err("a backward that fails")),
            }
            backward(&model.loss(&next, Fault::Nowhere)?)?;
            Ok(())
        })
        .into_iter()
        .collect::<AnyResult<Vec<_>>>()?;
    }
    Ok(())
}

/// Memory that was to be written first by the backward that fails holds nothing afterwards.
fn a_first_backward_that_fails_leaves_no_gradient() -> AnyResult<()> {
    ranks(2, TIMEOUT, |group| {
        let model = Model::new(&group, DType::F32, &[])?;
        let x = tokens(&group, 0, DType::F32)?;
        let expected = model.values(&backward(&model.loss(&x, Fault::Nowhere)?)?)?;
        let fault = if group.rank() == CULPRIT { Fault::BeforeAnyLayer } else { Fault::Nowhere };
        let mut main = MainGradients::new();
        main.backward(&model.loss(&x, fault)?).expect_err("a backward that fails");
        assert!(model.vars().iter().all(|var| main.get(var).is_err()));
        main.backward(&model.loss(&x, Fault::Nowhere)?)?;
        assert_eq!(model.values(main.store())?, expected);
        Ok(())
    })
    .into_iter()
    .collect::<AnyResult<Vec<_>>>()?;
    Ok(())
}

/// Experts of the user's own that fail in backward, between combine and dispatch.
fn experts_of_ones_own_that_fail_in_backward() -> AnyResult<()> {
    for count in [2, 4] {
        ranks(count, TIMEOUT, |group| {
            let moe = DispatchCombine::new(config(), &group)?;
            let x = tokens(&group, 0, DType::F32)?;
            let logits = x.narrow(1, 0, EXPERTS)?;
            let loss = |fails: bool| -> AnyResult<Tensor> {
                let routed = moe.route(&logits, None)?;
                let received = moe.dispatch(&x, &routed.ids, &routed.weights)?;
                let y = received.combine(&received.rows.apply_op1(Failing(fails))?)?;
                Ok(y.sqr()?.sum_all()?)
            };
            let error = backward(&loss(group.rank() == CULPRIT)?).expect_err("experts that fail");
            check_errors(&group, &error);
            backward(&loss(false)?)?;
            Ok(())
        })
        .into_iter()
        .collect::<AnyResult<Vec<_>>>()?;
    }
    Ok(())
}

/// One rank goes on with a microbatch where the others sum over the ranks.
fn a_rank_with_one_microbatch_more() -> AnyResult<()> {
    for count in [2, 4] {
        // The rank has one forward and backward more, or one backward of forwards that all have run.
        for all_forward in [false, true] {
            ranks(count, TIMEOUT, |group| {
                let model = Model::new(&group, DType::F32, &[])?;
                let [x, next] = [tokens(&group, 0, DType::F32)?, tokens(&group, 1, DType::F32)?];
                let mut main = MainGradients::new();
                main.backward(&model.loss(&x, Fault::Nowhere)?)?;
                let before = model.values(main.store())?;
                let kept = all_forward.then(|| model.loss(&next, Fault::Nowhere)).transpose()?;
                let error = match (group.rank() == CULPRIT, &kept) {
                    (false, _) => model.layers[0].reduce_gradients(main.store_mut()).expect_err("another count").into(),
                    (true, Some(loss)) => main.backward(loss).expect_err("another count").into(),
                    (true, None) => model.loss(&next, Fault::Nowhere).err().ok_or("a forward among sums")?,
                };
                let own = error_of(&*error);
                let named = |peer: &usize| (*peer == CULPRIT) != (group.rank() == CULPRIT);
                assert!(
                    matches!(own, Some(Error::Comm(CommError::TagMismatch { peer, .. })) if named(peer)),
                    "rank {}: {error}",
                    group.rank()
                );
                assert_eq!(model.values(main.store())?, before);
                Ok(())
            })
            .into_iter()
            .collect::<AnyResult<Vec<_>>>()?;
        }
    }
    Ok(())
}

/// A mistake that every rank of a program makes alike costs no collective, which may end a communicator.
fn a_backward_behind_lent_sums_communicates_nothing() -> AnyResult<()> {
    ranks(2, TIMEOUT, |group| {
        let model = Model::new(&group, DType::F32, &[])?;
        let x = tokens(&group, 0, DType::F32)?;
        let mut main = MainGradients::new();
        main.backward(&model.loss(&x, Fault::Nowhere)?)?;
        main.store_mut();
        let (loss, before) = (model.loss(&x, Fault::Nowhere)?, model.values(main.store())?);
        let calls = || group.lock().dispatcher().communicator().calls();
        let first = calls();
        let error = main.backward(&loss).expect_err("a backward behind lent sums");
        assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
        assert_eq!(calls(), first);
        // The forward is still good.
        main.reset();
        main.backward(&loss)?;
        assert_eq!(model.values(main.store())?, before);
        Ok(())
    })
    .into_iter()
    .collect::<AnyResult<Vec<_>>>()?;
    Ok(())
}

/// Sums in f32 of bf16 variables where a rank has no gradient of one: every rank has the sum in f32.
fn an_absent_gradient_has_the_other_ranks_type() -> AnyResult<()> {
    let types = [DType::BF16, DType::F32, DType::F16, DType::F64];
    for (count, wide) in [2, 4].into_iter().flat_map(|count| [(count, false), (count, true)]) {
        let results = ranks(count, TIMEOUT, |group| {
            let vars: Vec<Var> =
                types.into_iter().map(|dtype| wide_tokens(0..2, 3, dtype, &Device::Cpu)).collect::<AnyResult<_>>()?;
            let mut main = if wide { MainGradients::in_f32() } else { MainGradients::new() };
            let mut loss = Tensor::zeros((), DType::F64, &Device::Cpu)?;
            for (at, var) in vars.iter().enumerate() {
                // Each has none on one rank.
                if at % count != group.rank() {
                    let factor = 1.0 + group.rank() as f64 / 512.0;
                    loss = ((var.sqr()?.to_dtype(DType::F64)?.sum_all()? * factor)? + loss)?;
                }
            }
            main.backward(&loss)?;
            reduce_gradients(&group.clone().into(), &vars, main.store_mut())?;
            let sum = |var: &Var| -> AnyResult<_> {
                let sum = main.get(var)?;
                Ok((sum.dtype(), sum.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?))
            };
            vars.iter().map(sum).collect::<AnyResult<Vec<_>>>()
        });
        let results = results.into_iter().collect::<AnyResult<Vec<_>>>()?;
        for (at, own) in types.into_iter().enumerate() {
            let expected = if wide && own != DType::F64 { DType::F32 } else { own };
            assert_eq!(results[0][at].0, expected);
            assert!(results[0][at].1.iter().any(|v| *v != 0.0));
            assert!(results.iter().all(|rank| rank[at] == results[0][at]), "{own:?}: {results:?}");
        }
    }
    Ok(())
}

/// Ranks that list other variables, or others first, sum nothing, and work on.
fn variables_that_differ_are_refused_before_sums() -> AnyResult<()> {
    type Make = fn(usize) -> candle_core::Result<Vec<Var>>;
    let cases: [Make; 3] = [
        |rank| {
            let [first, second] = if rank == CULPRIT { [4, 3] } else { [3, 4] };
            Ok(vec![Var::ones(first, DType::F32, &Device::Cpu)?, Var::ones(second, DType::F32, &Device::Cpu)?])
        },
        |rank| {
            let dims = if rank == CULPRIT { (2, 3) } else { (3, 2) };
            Ok(vec![Var::ones(dims, DType::F32, &Device::Cpu)?])
        },
        |rank| {
            let dtype = if rank == CULPRIT { DType::BF16 } else { DType::F32 };
            Ok(vec![Var::ones(4, dtype, &Device::Cpu)?])
        },
    ];
    for (count, make) in [2, 4].into_iter().flat_map(|count| cases.map(|make| (count, make))) {
        ranks(count, TIMEOUT, |group| {
            let vars = make(group.rank())?;
            let of = |vars: &[Var]| -> candle_core::Result<GradStore> {
                let sums = vars.iter().map(|var| var.to_dtype(DType::F32)?.sum_all());
                sums.reduce(|a, b| a? + b?).ok_or_else(|| candle_core::Error::msg("no variable"))??.backward()
            };
            let mut gradients = of(&vars)?;
            let group = group.into();
            let error = reduce_gradients(&group, &vars, &mut gradients).expect_err("other variables");
            let named = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "variables");
            assert!(named, "{error}");
            for var in &vars {
                let values = gradients.get(var).ok_or("no gradient")?.flatten_all()?.to_dtype(DType::F32)?;
                assert!(values.to_vec1::<f32>()?.iter().all(|v| *v == 1.0));
            }
            let same = make(0)?;
            let mut gradients = of(&same)?;
            reduce_gradients(&group, &same, &mut gradients)?;
            let sum = gradients.get(&same[0]).ok_or("no gradient")?.flatten_all()?;
            assert!(sum.to_vec1::<f32>()?.iter().all(|v| *v == count as f32));
            Ok(())
        })
        .into_iter()
        .collect::<AnyResult<Vec<_>>>()?;
    }
    Ok(())
}

/// A gradient that one rank alone has of what all hold: nobody steps, and all work on. Any text refuses a step.
fn a_gradient_on_one_rank_alone_steps_nothing() -> AnyResult<()> {
    for count in [2, 4] {
        let comms = ThreadWorld::create(count, TIMEOUT);
        std::thread::scope(|scope| {
            let run = |comm: ThreadComm| -> AnyResult<()> {
                let rank = comm.rank();
                let [router, other] = [[1f32, 2.], [3., 4.]].map(|values| Var::new(&values, &Device::Cpu));
                let (router, other) = (router?, other?);
                let group = GroupOptions { lr: 0.5, ..GroupOptions::default() };
                let options = AdamWOptions { group, max_norm: Some(1.0), ..AdamWOptions::default() };
                let params = vec![AdamWParam::new("router", &router), AdamWParam::new("other", &other)];
                let mut adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[group])?;
                let all = || (router.sqr()?.sum_all()? + other.sqr()?.sum_all()?)?.backward();
                let one = if rank == CULPRIT { other.sqr()?.sum_all()?.backward()? } else { all()? };
                match error_of(&adam.step(&one).expect_err("a gradient on other ranks alone")) {
                    Some(Error::Invalid { name, found, .. }) => {
                        assert_eq!(name, "gradient of router");
                        assert_eq!(found, "one on rank 0, none on rank 1");
                    }
                    other => panic!("rank {rank}: {other:?}"),
                }
                assert_eq!((router.to_vec1::<f32>()?, other.to_vec1::<f32>()?), (vec![1., 2.], vec![3., 4.]));
                assert_eq!(adam.stats()?.steps, 0);
                // One that no rank has is no error.
                adam.step(&other.sqr()?.sum_all()?.backward()?)?;
                if rank == CULPRIT {
                    adam.refuse("a loss of no number");
                } else {
                    let error = adam.step(&all()?).expect_err("a refusal");
                    assert!(error.to_string().contains("a loss of no number"), "{error}");
                }
                adam.step(&all()?)?;
                assert_eq!(adam.stats()?.steps, 2);
                Ok(())
            };
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().try_for_each(|t| t.join().expect("a rank panicked"))
        })?;
    }
    Ok(())
}

/// One rank has its gradients in f32, the others in bf16, and one has none: their sums would step replicas apart.
fn gradients_of_another_type_are_an_error_on_every_rank() -> AnyResult<()> {
    ranks(4, TIMEOUT, |group| {
        let group_rank = group.rank();
        let var = wide_tokens(0..2, 3, DType::BF16, &Device::Cpu)?;
        let mut main = if group.rank() == 1 { MainGradients::in_f32() } else { MainGradients::new() };
        match group.rank() {
            3 => main.backward(&Var::zeros((), DType::F32, &Device::Cpu)?.sqr()?)?,
            _ => main.backward(&var.to_dtype(DType::F32)?.sqr()?.sum_all()?)?,
        }
        let vars = [var];
        // All are compared before the first bucket is summed.
        let (first, second) = (Var::ones(5, DType::F32, &Device::Cpu)?, vars[0].clone());
        main.store_mut().insert(&first, first.ones_like()?);
        let vars = [first, second];
        let before = main.get(&vars[1]).ok().map(flat).transpose()?;
        let mut comm = group.lock();
        let error = reduce_gradients_over(comm.dispatcher().communicator(), &Cpu::new(), &vars, 1, main.store_mut());
        let error = error.expect_err("another type");
        match error_of(&error) {
            Some(Error::Invalid { name, found, .. }) => {
                assert!(name.contains("bf16") && found.contains("1 of the 3 ranks"), "{error}");
            }
            other => panic!("{other:?} {error}"),
        }
        assert_eq!(flat(main.get(&vars[0])?)?, [1.0; 5]);
        assert_eq!(main.get(&vars[1]).ok().map(flat).transpose()?, before);
        // Ranks that cut their buckets otherwise would be in other collectives.
        let bytes = if group_rank == CULPRIT { 1 } else { 2 };
        let mut all = GradStore::default();
        let error = reduce_gradients_over(comm.dispatcher().communicator(), &Cpu::new(), &vars, bytes, &mut all);
        let error = error.expect_err("other buckets");
        let named = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "bucket_bytes");
        assert!(named, "{error}");
        Ok(())
    })
    .into_iter()
    .collect::<AnyResult<Vec<_>>>()?;
    Ok(())
}

fn a_main_gradient_of_a_frozen_weight() -> AnyResult<()> {
    ranks(2, TIMEOUT, |group| {
        let whole = of_type(group.clone(), full(), DType::F32)?;
        let tensors = whole.params().into_iter().map(|(name, t)| {
            let frozen = name == ParamKind::Up.name() || name == ParamKind::UpBias.name();
            (name.to_string(), if frozen { t.detach() } else { t.clone() })
        });
        let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu);
        let moe = ExpertParallelMoE::new(Layer::new(full(), 5)?, group.clone(), vb)?;
        let mut main = MainGradients::new();
        let x = tokens(&group, 0, DType::F32)?;
        main.backward(&moe.forward(&x)?.sqr()?.sum_all()?)?;
        assert!(main.get(moe.param(ParamKind::Down).ok_or("down")?).is_ok());
        let error = main.get(moe.param(ParamKind::Up).ok_or("up")?).expect_err("frozen");
        match error_of(&error) {
            Some(Error::Invalid { found, .. }) => assert!(found.contains("frozen"), "{found}"),
            other => panic!("{other:?}"),
        }
        Ok(())
    })
    .into_iter()
    .collect::<AnyResult<Vec<_>>>()?;
    Ok(())
}

/// Ranks that name different models save nothing, and each is told.
fn ranks_with_other_identities_save_nothing() -> AnyResult<()> {
    let folder = tempfile::tempdir()?;
    std::thread::scope(|scope| {
        let save = |comm: ThreadComm| -> AnyResult<()> {
            let (rank, var) = (comm.rank(), Var::new(&[1f32, 2.], &Device::Cpu)?);
            let (params, options) = (vec![AdamWParam::new("w", &var)], AdamWOptions::default());
            let adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[options.group])?;
            match error_of(&adam.with_identity(format!("model {rank}")).save(folder.path()).unwrap_err()) {
                Some(Error::ConfigMismatch { field, peer_value, .. }) => {
                    assert_eq!((field.as_str(), peer_value), ("identity", &format!("\"model {}\"", 1 - rank)));
                }
                other => panic!("rank {rank}: {other:?}"),
            }
            Ok(())
        };
        let start = |comm| scope.spawn(move || save(comm));
        let threads: Vec<_> = ThreadWorld::create(2, TIMEOUT).into_iter().map(start).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })?;
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);
    Ok(())
}

/// Experts of the user's own, of one name on every rank, are parts of one parameter: norm, steps and saved state are those
/// of a single rank that has all of them, a bias among them.
fn own_experts_step_as_parts_of_one_parameter() -> AnyResult<()> {
    const RANKS: usize = 2;
    let group = GroupOptions { lr: 0.25, ..GroupOptions::default() };
    let options = AdamWOptions { group, max_norm: Some(1.0), ..AdamWOptions::default() };
    let values = |rank: usize, dims: &[usize]| -> AnyResult<Var> {
        let count = dims.iter().product::<usize>();
        let of = (0..count).map(|i| ((rank * 7 + i * 3) % 11) as f32 - 5.0).collect::<Vec<_>>();
        Ok(Var::from_vec(of, dims, &Device::Cpu)?)
    };
    let gradients = |vars: [&Var; 2]| (vars[0].sqr()?.sum_all()? + vars[1].sqr()?.sum_all()?)?.backward();
    let folder = tempfile::tempdir()?;
    // The same as one rank has it: ranks' rows behind each other.
    let whole = [[3, 4], [1, 3]].map(|dims| -> AnyResult<Var> {
        let parts =
            (0..RANKS).map(|rank| Ok(values(rank, &dims)?.as_detached_tensor())).collect::<AnyResult<Vec<_>>>()?;
        Ok(Var::from_tensor(&Tensor::cat(&parts, 0)?)?)
    });
    let [weight, bias] = whole;
    let (weight, bias) = (weight?, bias?);
    let named = vec![AdamWParam::new("expert.weight", &weight), AdamWParam::new("expert.bias", &bias)];
    let mut one = AdamW::with_groups(named, options, &[group])?;
    let mut norms = Vec::new();
    for _ in 0..2 {
        one.step(&gradients([&weight, &bias])?)?;
        norms.push(one.stats()?.norm);
    }
    let at_two = [flat(&weight)?, flat(&bias)?];
    let run = |comm: ThreadComm| -> AnyResult<()> {
        let rank = comm.rank();
        let (weight, bias) = (values(rank, &[3, 4])?, values(rank, &[3])?);
        let part = |name: &str, var: &Var| -> AnyResult<AdamWParam> {
            Ok(AdamWParam::new(name, var).with_shard(ParamShard::of_experts(var.dims(), rank, RANKS)?))
        };
        let params = vec![part("expert.weight", &weight)?, part("expert.bias", &bias)?];
        let mut adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[group])?;
        for norm in &norms {
            adam.step(&gradients([&weight, &bias])?)?;
            assert_eq!(adam.stats()?.norm, *norm, "rank {rank}");
        }
        assert_eq!(flat(&weight)?, at_two[0][rank * 12..(rank + 1) * 12]);
        assert_eq!(flat(&bias)?, at_two[1][rank * 3..(rank + 1) * 3]);
        Ok(adam.save(folder.path().join("state"))?)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            ThreadWorld::create(RANKS, TIMEOUT).into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a rank panicked"))
    })?;
    // What two ranks have saved goes on on one, with both ranks' moments.
    let resumed = [weight.as_detached_tensor(), bias.as_detached_tensor()].map(|t| Var::from_tensor(&t));
    let [first, second] = resumed;
    let (first, second) = (first?, second?);
    let named = vec![AdamWParam::new("expert.weight", &first), AdamWParam::new("expert.bias", &second)];
    let mut loaded = AdamW::with_groups(named, options, &[group])?;
    assert_eq!(loaded.load(folder.path().join("state"))?, 2);
    one.step(&gradients([&weight, &bias])?)?;
    loaded.step(&gradients([&first, &second])?)?;
    assert_eq!([flat(&first)?, flat(&second)?], [flat(&weight)?, flat(&bias)?]);
    Ok(())
}

/// What fails in an optimizer's step before its norm is told to the ranks that wait there, and all go on.
fn a_step_that_fails_before_the_norm_is_told() -> AnyResult<()> {
    for fault in ["lr", "a gradient's size", "the loss"] {
        let comms = ThreadWorld::create(2, TIMEOUT);
        let results = std::thread::scope(|scope| {
            let step = |comm: ThreadComm| -> AnyResult<candle_core::Result<()>> {
                let fails = comm.rank() == CULPRIT;
                let var = Var::new(&[1f32, 2.], &Device::Cpu)?;
                let group = GroupOptions { lr: 0.5, ..GroupOptions::default() };
                let options = AdamWOptions { group, max_norm: Some(1.0), ..AdamWOptions::default() };
                let params = vec![AdamWParam::new("w", &var)];
                let mut adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[group])?;
                let gradients = || var.as_tensor().sqr()?.sum_all()?.backward();
                let failed = match fault {
                    "lr" if fails => {
                        adam.set_learning_rate(f64::NAN);
                        let failed = adam.step(&gradients()?);
                        adam.set_learning_rate(0.5);
                        failed
                    }
                    "a gradient's size" if fails => {
                        let mut gradients = gradients()?;
                        gradients.insert(&var, Tensor::new(&[1f32], &Device::Cpu)?);
                        adam.step(&gradients)
                    }
                    "the loss" if fails => {
                        adam.backward_step(&var.as_tensor().sqr()?.sum_all()?.apply_op1(Failing(true))?)
                    }
                    _ => adam.step(&gradients()?),
                };
                adam.step(&gradients()?)?;
                assert_eq!(adam.stats()?.steps, 1, "{fault}");
                Ok(failed)
            };
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || step(comm))).collect();
            threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect::<AnyResult<Vec<_>>>()
        })?;
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.expect_err(fault);
            let told = matches!(error_of(&error), Some(Error::Comm(CommError::Refused { peer: CULPRIT, .. })));
            assert_eq!(told, rank != CULPRIT, "{fault}: {error}");
        }
    }
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    ranks_with_other_identities_save_nothing,
    variables_that_differ_are_refused_before_sums,
    a_gradient_on_one_rank_alone_steps_nothing,
    a_step_that_fails_before_the_norm_is_told,
    own_experts_step_as_parts_of_one_parameter,
    main_gradients_are_candles_on_any_number_of_ranks,
    microbatches_of_ranks_are_summed_as_candles,
    a_backward_that_fails_before_a_layer_is_told,
    a_first_backward_that_fails_leaves_no_gradient,
    experts_of_ones_own_that_fail_in_backward,
    a_rank_with_one_microbatch_more,
    a_backward_behind_lent_sums_communicates_nothing,
    an_absent_gradient_has_the_other_ranks_type,
    gradients_of_another_type_are_an_error_on_every_rank,
    a_main_gradient_of_a_frozen_weight,
}
