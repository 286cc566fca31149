//! The layer as a candle user meets it: inside a model, trained, with odd shapes, and used wrongly.
#![cfg(feature = "candle")]

use std::time::Duration;

use candle_core::{D, DType, Device, Module, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use moebius::candle::{EpGroup, ExpertParallelMoE};
use moebius::comm::ThreadWorld;
use moebius::config::{AuxConfig, BalanceKind};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Layer, Mode, Role};
use moebius::{DType as OurDType, MoeConfig};

type AnyResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const H: usize = 16;
const EXPERTS: usize = 8;

fn config() -> MoeConfig {
    MoeConfig::new(H, 24, EXPERTS, 2)
}

fn single(config: MoeConfig, dtype: DType) -> AnyResult<ExpertParallelMoE> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), dtype, &Device::Cpu);
    let group = EpGroup::single(GroupConfig::new(EXPERTS, 1024))?;
    Ok(ExpertParallelMoE::new(Layer::new(config, 0)?, group, vb)?)
}

/// Runs one closure a rank, each on its own thread, and returns what they give in rank order.
fn ranks<R: Send>(count: usize, timeout: Duration, run: impl Fn(EpGroup) -> AnyResult<R> + Sync) -> Vec<AnyResult<R>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ThreadWorld::create(count, timeout)
            .into_iter()
            .map(|comm| {
                let run = &run;
                scope.spawn(move || {
                    let group = Group::new(Cpu::new(), (), Box::new(comm), GroupConfig::new(EXPERTS, 1024))?;
                    run(EpGroup::new(group))
                })
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect();
        for (rank, error) in results.iter().enumerate().filter_map(|(r, e)| Some((r, e.as_ref().err()?))) {
            eprintln!("rank {rank}: {error}");
        }
        results
    })
}

/// A layer of a rank with the same weights whatever the number of ranks: expert e's are filled from e.
fn seeded(group: EpGroup, config: MoeConfig) -> AnyResult<ExpertParallelMoE> {
    let local = EXPERTS / group.ranks();
    let first = group.rank() * local;
    let layer = Layer::new(config, 3)?;
    let tensors = Role::ALL
        .into_iter()
        .filter_map(|role| {
            let dims = role.dims(layer.config(), local)?;
            let count: usize = dims.iter().product();
            let start = if role.is_replicated() { 0 } else { first * count / local };
            let values: Vec<f32> =
                (start..start + count).map(|i| ((i * 7919 + 13) % 101) as f32 / 250.0 - 0.2).collect();
            Some(Tensor::from_vec(values, dims, &Device::Cpu).map(|t| (role.name().to_string(), t)))
        })
        .collect::<candle_core::Result<std::collections::HashMap<_, _>>>()?;
    let tensors = tensors.into_iter().map(|(n, t)| Ok((n, Var::from_tensor(&t)?.into_inner())));
    let tensors = tensors.collect::<candle_core::Result<_>>()?;
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    Ok(ExpertParallelMoE::new(layer, group, vb)?)
}

fn tokens(rows: std::ops::Range<usize>) -> AnyResult<Var> {
    let (start, count) = (rows.start * H, rows.len() * H);
    let values: Vec<f32> = (start..start + count).map(|i| ((i * 104729 + 7) % 211) as f32 / 100.0 - 1.05).collect();
    Ok(Var::from_tensor(&Tensor::from_vec(values, (rows.len(), H), &Device::Cpu)?)?)
}

#[test]
fn any_leading_dimensions_and_layouts() -> AnyResult<()> {
    let moe = single(config(), DType::F32)?;
    let x = Tensor::randn(0f32, 1., (6, H), &Device::Cpu)?;
    let flat = moe.forward(&x)?.to_vec2::<f32>()?;
    let cube = moe.forward(&x.reshape((2, 3, H))?)?;
    assert_eq!(cube.dims(), [2, 3, H]);
    assert_eq!(cube.reshape((6, H))?.to_vec2::<f32>()?, flat);
    let strided = x.t()?.contiguous()?.t()?;
    assert!(!strided.is_contiguous());
    assert_eq!(moe.forward(&strided)?.to_vec2::<f32>()?, flat);
    assert_eq!(moe.forward(&x.narrow(0, 0, 0)?)?.dims(), [0, H]);
    Ok(())
}

#[test]
fn nothing_is_kept_where_nothing_tracks() -> AnyResult<()> {
    let trained = single(config(), DType::F32)?;
    let x = Tensor::randn(0f32, 1., (6, H), &Device::Cpu)?;
    assert!(trained.forward(&x)?.track_op(), "parameters are variables");
    let frozen = trained.params().into_iter().map(|(n, t)| (n.to_string(), t.detach())).collect();
    let group = EpGroup::single(GroupConfig::new(EXPERTS, 1024))?;
    let vb = VarBuilder::from_tensors(frozen, DType::F32, &Device::Cpu);
    let frozen = ExpertParallelMoE::new(trained.layer().clone(), group, vb)?;
    let y = frozen.forward(&x)?;
    assert!(!y.track_op(), "no operation, so no context, hangs on the output");
    assert_eq!(y.to_vec2::<f32>()?, trained.forward(&x)?.to_vec2::<f32>()?);
    // x alone tracks: its gradient and nothing else.
    let x = Var::from_tensor(&x)?;
    let gradients = frozen.forward(&x)?.sum_all()?.backward()?;
    assert!(gradients.get(&x).is_some());
    assert!(frozen.vars().is_empty());
    Ok(())
}

#[test]
fn a_second_backward_is_an_error_before_any_collective() -> AnyResult<()> {
    let results = ranks(2, Duration::from_secs(20), |group| {
        let moe = seeded(group, config())?;
        let loss = moe.forward(tokens(0..3)?.as_tensor())?.sqr()?.sum_all()?;
        loss.backward()?;
        let calls = moe.group().lock().dispatcher().communicator().calls();
        let error = loss.backward().err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(moe.group().lock().dispatcher().communicator().calls(), calls);
        // The group works on.
        moe.forward(tokens(0..3)?.as_tensor())?.sum_all()?.backward()?;
        Ok(error)
    });
    for (rank, error) in results.into_iter().enumerate() {
        let error = error?;
        assert!(error.contains("consumed") && error.contains(&format!("rank {rank}")), "{error}");
    }
    Ok(())
}

#[test]
fn an_absent_gradient_counts_as_zeros() -> AnyResult<()> {
    let mut with_aux = config();
    with_aux.aux = AuxConfig::default();
    with_aux.aux.balance = 0.5;
    with_aux.aux.z = 0.25;
    let moe = single(with_aux, DType::F64)?;
    let x = Var::randn(0f64, 1., (12, H), &Device::Cpu)?;
    // Only the auxiliary loss is used: experts' gradients are exact zeros, the router's are not.
    let gradients = moe.forward_full(&x, Mode::default())?.aux.backward()?;
    let norm = |role: Role| -> AnyResult<f64> {
        let param = moe.param(role).ok_or("no such parameter")?;
        Ok(gradients.get(param).ok_or("no gradient")?.abs()?.sum_all()?.to_scalar::<f64>()?)
    };
    assert_eq!(norm(Role::Up)?, 0.0);
    assert_eq!(norm(Role::Down)?, 0.0);
    assert!(norm(Role::Router)? > 0.0);
    // Both outputs: the gradients add. Linear in the cotangents, so f64 sums agree to rounding.
    let both = moe.forward_full(&x, Mode::default())?;
    let both = both.y.sum_all()?.add(&(both.aux * 3.0)?)?.backward()?;
    let y_only = moe.forward(&x)?.sum_all()?.backward()?;
    let router = moe.param(Role::Router).ok_or("no router")?;
    let of = |g: &candle_core::backprop::GradStore| g.get(router).cloned().ok_or("no gradient");
    let expected = (of(&y_only)? + (of(&gradients)? * 3.0)?)?;
    let error = (of(&both)? - &expected)?.abs()?.max_all()?.to_scalar::<f64>()?;
    let scale = expected.abs()?.max_all()?.to_scalar::<f64>()?;
    assert!(error <= 1e-13 * scale, "{error} of {scale}");
    Ok(())
}

/// What one rank's part of a step gives: its y, d x, and (role, gradient).
type Part = (Vec<f32>, Vec<f32>, Vec<(Role, Vec<f32>)>);

fn step(moe: &ExpertParallelMoE, rows: std::ops::Range<usize>) -> AnyResult<Part> {
    let x = tokens(rows)?;
    // Ordinary operations before and after, and the layer twice in one graph. The layer's output stands on the
    // left of a sum: on the rank without tokens candle keeps the left operand only.
    let h = (x.as_tensor() * 0.5)?;
    let once = moe.forward(&h)?;
    let y = (moe.forward(&(&once + &h)?)? + once)?;
    let gradients = y.sqr()?.sum_all()?.backward()?;
    let of = |t: &Tensor| -> AnyResult<Vec<f32>> {
        match gradients.get(t) {
            Some(g) => Ok(g.flatten_all()?.to_vec1()?),
            None => Ok(vec![0.0; t.elem_count()]),
        }
    };
    let params = Role::ALL.into_iter().filter_map(|r| moe.param(r).map(|t| (r, t)));
    let params = params.map(|(r, t)| Ok((r, of(t)?))).collect::<AnyResult<_>>()?;
    Ok((y.flatten_all()?.to_vec1()?, of(&x)?, params))
}

#[test]
fn ranks_share_the_work_of_one() -> AnyResult<()> {
    let mut full = config();
    full.shared = Some(moebius::config::SharedConfig { intermediate: 8, gated: true });
    full.expert_bias = true;
    full.router.logit_bias = true;
    let total = 13;
    let whole = ranks(1, Duration::from_secs(20), |g| step(&seeded(g, full.clone())?, 0..total)).remove(0)?;
    // Uneven shares; the last rank of four has no tokens.
    for cuts in [vec![0, 5, 13], vec![0, 6, 7, 13, 13]] {
        let parts = ranks(cuts.len() - 1, Duration::from_secs(20), |g| {
            let rank = g.rank();
            step(&seeded(g, full.clone())?, cuts[rank]..cuts[rank + 1])
        });
        let parts = parts.into_iter().collect::<AnyResult<Vec<_>>>()?;
        let join = |f: &dyn Fn(&Part) -> &Vec<f32>| parts.iter().flat_map(|p| f(p).clone()).collect::<Vec<_>>();
        close("y", &join(&|p| &p.0), &whole.0);
        close("d x", &join(&|p| &p.1), &whole.1);
        for (i, (role, expected)) in whole.2.iter().enumerate() {
            let found = match role.is_replicated() {
                false => join(&|p| &p.2[i].1),
                true => (0..expected.len()).map(|j| parts.iter().map(|p| p.2[i].1[j]).sum()).collect(),
            };
            close(role.name(), &found, expected);
        }
    }
    Ok(())
}

/// Relative error at most 1e-5: products of up to 24 terms through five chained sums, each within a few ulp
/// (6e-8), with gradients summed over 13 tokens in another order.
fn close(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    let scale = norm(&mut expected.iter().map(|v| f64::from(*v)));
    assert!(error <= 1e-5 * scale, "{name}: {error} of {scale}");
}

#[test]
fn adamw_trains_it_inside_a_model() -> AnyResult<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let group = EpGroup::single(GroupConfig::new(EXPERTS, 1024))?;
    let mut with_aux = config();
    with_aux.aux.balance = 0.01;
    with_aux.aux.balance_kind = BalanceKind::HuggingFace;
    let first = candle_nn::linear(4, H, vb.pp("first"))?;
    let moe = ExpertParallelMoE::new(Layer::new(with_aux, 0)?, group, vb.pp("moe"))?;
    let last = candle_nn::linear(H, 1, vb.pp("last"))?;
    let values: Vec<f32> = (0..256).map(|i| ((i * 7919) % 127) as f32 / 63.5 - 1.0).collect();
    let x = Tensor::from_vec(values, (64, 4), &Device::Cpu)?;
    let target = (x.narrow(1, 0, 1)? * x.narrow(1, 1, 1)?)?;
    let mut adam = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.01, ..Default::default() })?;
    let mut losses = Vec::new();
    for _ in 0..150 {
        let out = moe.forward_full(&first.forward(&x)?, Mode::default())?;
        let error = (last.forward(&out.y)? - &target)?.sqr()?.mean_all()?;
        losses.push(error.to_scalar::<f32>()?);
        adam.backward_step(&(error + out.aux)?)?;
    }
    let (start, end) = (losses[0], losses[losses.len() - 1]);
    assert!(end < 0.2 * start, "the loss went from {start} to {end}");
    Ok(())
}

#[test]
fn fresh_variables_agree_where_ranks_share_them() -> AnyResult<()> {
    let results = ranks(3 + 1, Duration::from_secs(20), |group| {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let mut shared = config();
        shared.shared = Some(moebius::config::SharedConfig { intermediate: 8, gated: true });
        let moe = ExpertParallelMoE::new(Layer::new(shared, 0)?, group, vb)?;
        let of = |t: &Tensor| -> AnyResult<Vec<f32>> { Ok(t.flatten_all()?.to_vec1()?) };
        let all = Role::ALL.into_iter().filter_map(|r| moe.param(r).map(|t| (r, t)));
        all.map(|(r, t)| Ok((r, of(t)?))).collect::<AnyResult<Vec<_>>>()
    });
    let results = results.into_iter().collect::<AnyResult<Vec<_>>>()?;
    for other in &results[1..] {
        for ((role, first), (_, second)) in results[0].iter().zip(other) {
            assert_eq!(first == second, role.is_replicated(), "{role:?}");
        }
    }
    Ok(())
}

#[test]
fn backward_is_refused_where_a_rank_does_not_track() -> AnyResult<()> {
    let results = ranks(2, Duration::from_secs(20), |group| {
        let rank = group.rank();
        let moe = seeded(group, config())?;
        let x = tokens(0..4)?;
        let detached = moe.params().into_iter().map(|(n, t)| (n.to_string(), t.detach())).collect();
        let vb = VarBuilder::from_tensors(detached, DType::F32, &Device::Cpu);
        let frozen = ExpertParallelMoE::new(moe.layer().clone(), moe.group().clone(), vb)?;
        if rank == 1 {
            frozen.forward(&x.detach())?;
            return Ok(None);
        }
        let error = moe.forward(&x)?.sum_all()?.backward().err().map(|e| e.to_string());
        Ok(Some(error.unwrap_or_default()))
    });
    let errors: Vec<_> = results.into_iter().collect::<AnyResult<_>>()?;
    let error = errors[0].clone().unwrap_or_default();
    assert!(error.contains("not agreed") && error.contains("[1]"), "{error}");
    Ok(())
}

#[test]
fn wrong_inputs_are_errors_on_every_rank() -> AnyResult<()> {
    for bad in ["width", "dtype", "integer", "scalar", "nan"] {
        let results = ranks(2, Duration::from_secs(20), |group| {
            let rank = group.rank();
            let moe = seeded(group, config())?;
            let good = tokens(0..4)?;
            let x = match (rank, bad) {
                (1, "width") => Tensor::zeros((4, H + 1), DType::F32, &Device::Cpu)?,
                (1, "dtype") => good.to_dtype(DType::F64)?,
                (1, "integer") => good.to_dtype(DType::U32)?,
                (1, "scalar") => Tensor::new(1f32, &Device::Cpu)?,
                (1, "nan") => (good.as_tensor() * f64::NAN)?,
                _ => good.as_tensor().clone(),
            };
            let error = moe.forward(&x).err().map(|e| e.to_string()).unwrap_or_default();
            moe.forward(&good)?;
            Ok(error)
        });
        let errors: Vec<_> = results.into_iter().collect::<AnyResult<_>>()?;
        assert!(errors[0].contains("rank 1"), "{bad}: the peer's error names the rank: {:?}", errors[0]);
        assert!(!errors[1].is_empty(), "{bad}");
    }
    Ok(())
}

#[test]
fn half_types_stay_near_f32() -> AnyResult<()> {
    // One rounding to 8 (11) bits at each of four stored tensors: 4 half-ulps of relative size 2^-9 (2^-12).
    for (dtype, bound) in [(DType::BF16, 4.0 / 512.0), (DType::F16, 4.0 / 4096.0)] {
        let moe = single(config(), dtype)?;
        let x = Tensor::randn(0f32, 1., (32, H), &Device::Cpu)?.to_dtype(dtype)?;
        let y = moe.forward(&x)?;
        assert_eq!(y.dtype(), dtype);
        let wide = moe.params().into_iter().map(|(n, t)| Ok((n.to_string(), t.to_dtype(DType::F32)?)));
        let wide = wide.collect::<candle_core::Result<_>>()?;
        let group = EpGroup::single(GroupConfig::new(EXPERTS, 1024))?;
        let vb = VarBuilder::from_tensors(wide, DType::F32, &Device::Cpu);
        let reference = ExpertParallelMoE::new(moe.layer().clone(), group, vb)?.forward(&x.to_dtype(DType::F32)?)?;
        let error = (y.to_dtype(DType::F32)? - &reference)?.sqr()?.sum(D::Minus1)?.sum_all()?.sqrt()?;
        let error = error.to_scalar::<f32>()? / reference.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?;
        assert!(f64::from(error) <= bound, "{dtype:?}: {error}");
    }
    assert_eq!(OurDType::BF16.size(), 2);
    Ok(())
}
