//! Initial values of modules over several ranks.

use std::sync::Mutex;
use std::time::Duration;

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use moebius::candle::ExpertParallelMoE;
use moebius::layer::{Layer, ParamKind};
use rand::Rng;
use rand::rngs::StdRng;

use crate::ranks::ranks;
use crate::support::{AnyResult, EXPERTS, H, config, normal, seeded};
use crate::trials::{seed, tests};

/// Variables drawn from a seed: candle's own generator of the CPU takes none.
struct Fresh(Mutex<StdRng>);

impl SimpleBackend for Fresh {
    fn get(&self, s: Shape, _: &str, h: Init, dtype: DType, dev: &Device) -> candle_core::Result<Tensor> {
        let mut draw = self.0.lock().expect("a generator");
        let values: Vec<f64> = match h {
            Init::Const(value) => vec![value; s.elem_count()],
            Init::Uniform { lo, up } => (0..s.elem_count()).map(|_| draw.random_range(lo..up)).collect(),
            other => candle_core::bail!("not drawn here: {other:?}"),
        };
        Ok(Var::from_tensor(&Tensor::from_vec(values, s, dev)?.to_dtype(dtype)?)?.into_inner())
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("{name}: without a shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

/// A rank's own.
pub fn fresh(rank: usize) -> VarBuilder<'static> {
    let drawn = Fresh(Mutex::new(seed::generator(40 + rank as u64)));
    VarBuilder::from_backend(Box::new(drawn), DType::F32, Device::Cpu)
}

fn fresh_variables_agree_where_ranks_share_them() -> AnyResult<()> {
    let results = ranks(3 + 1, Duration::from_secs(20), |group| {
        let vb = fresh(group.rank());
        let mut shared = config();
        shared.shared = Some(moebius::config::SharedConfig { intermediate: 8, gated: true, bias: true });
        let moe = ExpertParallelMoE::new(Layer::new(shared, 0)?, group, vb)?;
        let of = |t: &Tensor| -> AnyResult<Vec<f32>> { Ok(t.flatten_all()?.to_vec1()?) };
        let all = ParamKind::ALL.into_iter().filter_map(|r| moe.param(r).map(|t| (r, t)));
        all.map(|(r, t)| Ok((r, of(t)?))).collect::<AnyResult<Vec<_>>>()
    });
    let results = results.into_iter().collect::<AnyResult<Vec<_>>>()?;
    for other in &results[1..] {
        for ((kind, first), (_, second)) in results[0].iter().zip(other) {
            assert_eq!(first == second, kind.is_replicated(), "{kind:?}");
        }
    }
    Ok(())
}

/// New experts of several ranks are drawn by the router and their place: each another, and the same of two ranks and of four.
fn new_experts_are_those_of_their_place() -> AnyResult<()> {
    let run = |count: usize| -> AnyResult<Vec<Vec<Vec<f32>>>> {
        let results = ranks(count, Duration::from_secs(20), |group| {
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            // What a generator that begins alike on all ranks draws there.
            let router = normal(90, &[EXPERTS, H], DType::F32, &Device::Cpu)?;
            vb.get((EXPERTS, H), "router.weight")?;
            vars.data().lock().map_err(|e| e.to_string())?["router.weight"].set(&router)?;
            let moe = ExpertParallelMoE::new(config(), &group, vb)?;
            let of = |kind: ParamKind| -> AnyResult<Vec<Vec<f32>>> {
                let t = moe.param(kind).ok_or("a parameter")?;
                Ok(t.flatten_from(1)?.to_vec2()?)
            };
            Ok([of(ParamKind::Up)?, of(ParamKind::Down)?].concat())
        });
        let results = results.into_iter().collect::<AnyResult<Vec<_>>>()?;
        // All experts' up, in the ranks' order, and then their down.
        let local = EXPERTS / count;
        let all = |first: usize| results.iter().flat_map(|own| own[first..first + local].to_vec()).collect::<Vec<_>>();
        Ok(vec![all(0), all(local)])
    };
    let two = run(2)?;
    for weights in &two {
        for (at, expert) in weights.iter().enumerate() {
            assert!(!weights[..at].contains(expert), "two experts are alike");
            let bound = 1.0 / (expert.len() as f32 / 2.0).sqrt();
            assert!(expert.iter().any(|v| v.abs() > 1e-4 * bound), "an expert of zeros");
        }
    }
    assert_eq!(run(4)?, two);
    Ok(())
}

/// Constants too, as those of a file that differs on some rank.
fn constants_agree_where_ranks_share_them() -> AnyResult<()> {
    let results = ranks(2, Duration::from_secs(20), |group| {
        let drawn = seeded(group.clone(), config())?;
        let scale = 1.0 + group.rank() as f64;
        let other = |(name, t): (&str, &Tensor)| Ok((name.to_string(), (t.detach() * scale)?));
        let tensors = drawn.params().into_iter().map(other).collect::<candle_core::Result<_>>()?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let moe = ExpertParallelMoE::new(Layer::new(config(), 0)?, group, vb)?;
        let of = |kind| -> AnyResult<Vec<f32>> { Ok(moe.param(kind).ok_or("a parameter")?.flatten_all()?.to_vec1()?) };
        let expected: Vec<f32> = drawn.param(ParamKind::Router).ok_or("a router")?.flatten_all()?.to_vec1()?;
        Ok((of(ParamKind::Router)?, expected))
    });
    for result in results {
        let (found, first) = result?;
        assert_eq!(found, first);
    }
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    fresh_variables_agree_where_ranks_share_them,
    new_experts_are_those_of_their_place,
    constants_agree_where_ranks_share_them,
}
