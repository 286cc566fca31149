//! Memory of a step's gradients: candle's own store beside main gradients, counted at the allocator.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use moebius::MoeConfig;
use moebius::candle::{ExpertParallelMoE, MainGradients, moe};
use moebius::layer::ParamKind;

#[path = "common/counting_allocator.rs"]
mod counting_allocator;

use counting_allocator::most_bytes;

const EXPERTS: usize = 16;
const SIZE: usize = 512;
const TOKENS: usize = 64;
const MICROBATCHES: usize = 3;
/// Elements of the experts' weights.
const ELEMENTS: usize = EXPERTS * 3 * SIZE * SIZE;

/// Values that depend on their number alone.
fn values(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + 13) % 1009) as f32 / 10_000.0 - 0.05).collect()
}

fn module() -> Result<ExpertParallelMoE> {
    let config = MoeConfig::new(SIZE, SIZE, EXPERTS, 2);
    let var = |kind: ParamKind| -> Result<_> {
        let dims = kind.dims(&config, EXPERTS).unwrap();
        let t = Tensor::from_vec(values(dims.iter().product()), dims, &Device::Cpu)?.to_dtype(DType::BF16)?;
        Ok((kind.name().to_string(), Var::from_tensor(&t)?.into_inner()))
    };
    let tensors = [ParamKind::Router, ParamKind::Up, ParamKind::Down].map(var).into_iter().collect::<Result<_>>()?;
    moe(config, VarBuilder::from_tensors(tensors, DType::BF16, &Device::Cpu))
}

fn loss(moe: &ExpertParallelMoE) -> Result<Tensor> {
    let x = Tensor::from_vec(values(TOKENS * SIZE), (TOKENS, SIZE), &Device::Cpu)?.to_dtype(DType::BF16)?;
    moe.forward(&x)?.to_dtype(DType::F32)?.sqr()?.sum_all()
}

/// Most bytes that `work` has had beside what there was before, over the experts' weights in bf16.
fn most(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let (done, bytes) = most_bytes(work);
    done?;
    Ok(bytes as f64 / (2 * ELEMENTS) as f64)
}

/// A step's gradients in candle's store, added over microbatches.
fn plain(moe: &ExpertParallelMoE, vars: &[Var]) -> Result<()> {
    let mut sums: Option<GradStore> = None;
    for _ in 0..MICROBATCHES {
        let gradients = loss(moe)?.backward()?;
        let Some(sums) = &mut sums else {
            sums = Some(gradients);
            continue;
        };
        for var in vars {
            if let (Some(before), Some(new)) = (sums.get(var), gradients.get(var)) {
                let sum = (before + new)?;
                sums.insert(var, sum);
            }
        }
    }
    Ok(())
}

fn main_gradients(moe: &ExpertParallelMoE, mut gradients: MainGradients) -> Result<()> {
    (0..MICROBATCHES).try_for_each(|_| gradients.backward(&loss(moe)?))
}

/// In units of the experts' weights: candle's store holds sums, a backward's new gradients, and the zeros or sums that
/// these are added to: three at least. Main gradients are one such, or two in f32. The rest of a step (tokens,
/// activations, what each thread packs of its products) is small here: below a half.
#[test]
fn main_gradients_take_one_gradients_memory() {
    let moe = module().unwrap();
    let vars = moe.vars();
    // What a first step leaves for all others, such as threads.
    plain(&moe, &vars).unwrap();
    let store = most(|| plain(&moe, &vars)).unwrap();
    let own = most(|| main_gradients(&moe, MainGradients::new())).unwrap();
    let wide = most(|| main_gradients(&moe, MainGradients::in_f32())).unwrap();
    println!(
        "candle's store {store:.2}, main gradients {own:.2}, in f32 {wide:.2}, times the experts' weights in bf16"
    );
    assert!((1.0..1.5).contains(&own), "{own}");
    assert!((2.0..2.5).contains(&wide), "{wide}");
    assert!(store > 3.0, "{store}");
}
