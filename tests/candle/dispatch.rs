//! Dispatch and combine with experts of the user's own between them: closed forms, against the module, in f64 against
//! finite differences, several in flight, and used wrongly. Over ranks that are threads on the CPU, over one GPU, and over
//! several.

use std::ops::Range;
use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Module, Tensor, Var};
use moebius::candle::{
    DeviceGroup, DispatchCombine, Dispatched, DispatchedRowsMut, EpGroup, ExpertParallelMoE, error_of,
};
use moebius::config::{CapacityOrder, ExpertCapacity, Payload};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Capacity, Group, GroupConfig};
use moebius::layer::{DispatchOptions, Layer, ParamKind};
use moebius::{Error, MoeConfig};

use crate::support::{AnyResult, EXPERTS, H, close, config, flat, normal, of_type, wide_tokens};
use crate::trials::tests;

/// Rows of a static capacity: 13 tokens of 2 choices, each expert's rounded up to 4.
const CAPACITY: usize = 64;
const LONG: Duration = Duration::from_secs(60);
/// Tokens of each rank, by number of ranks; the last of four has none.
const CUTS: [&[usize]; 4] = [&[0, 13], &[0, 5, 13], &[0, 6, 7, 13, 13], &[0, 6, 7, 10, 13]];

/// Where a test's ranks are.
pub enum Place {
    /// Threads, of every number in [`CUTS`].
    Cpu,
    /// One rank on this device.
    #[cfg(feature = "cuda")]
    Gpu(Device),
    /// So many ranks, a GPU each.
    #[cfg(feature = "nccl")]
    Gpus(usize),
}

impl Place {
    fn is_cpu(&self) -> bool {
        matches!(self, Place::Cpu)
    }

    /// The divisions of 13 tokens over ranks that it can have.
    fn cuts(&self) -> Vec<&'static [usize]> {
        let all = CUTS.into_iter();
        match self {
            Place::Cpu => all.collect(),
            #[cfg(feature = "cuda")]
            Place::Gpu(_) => vec![CUTS[0]],
            #[cfg(feature = "nccl")]
            Place::Gpus(count) => {
                // A GPU has no tensor of no elements in candle.
                let is_full = |cuts: &&[usize]| cuts.windows(2).all(|cut| cut[0] < cut[1]);
                all.filter(|cuts| cuts.len() == count + 1).filter(is_full).collect()
            }
        }
    }

    /// A number of ranks that it can have, two on the CPU.
    pub fn count(&self) -> usize {
        match self {
            Place::Cpu => 2,
            #[cfg(feature = "cuda")]
            Place::Gpu(_) => 1,
            #[cfg(feature = "nccl")]
            Place::Gpus(count) => *count,
        }
    }
}

/// Runs a closure on each rank; results in rank order.
pub fn on_ranks<R: Send>(
    place: &Place,
    count: usize,
    run: impl Fn(&DeviceGroup) -> AnyResult<R> + Sync,
) -> AnyResult<Vec<R>> {
    let group = GroupConfig { max_rows: CAPACITY, ..GroupConfig::new(EXPERTS, 64) };
    match place {
        Place::Cpu => {}
        #[cfg(feature = "cuda")]
        Place::Gpu(device) => return Ok(vec![run(&DeviceGroup::single(group, device)?)?]),
        #[cfg(feature = "nccl")]
        Place::Gpus(_) => return crate::gpus::on_ranks(count, &group, run),
    }
    std::thread::scope(|scope| {
        let threads = ThreadWorld::create(count, LONG).into_iter().map(|comm| {
            let (run, group) = (&run, group.clone());
            scope.spawn(move || run(&EpGroup::new(Group::new(Cpu::poisoning(), Box::new(comm), group)?).into()))
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

/// Two distinct experts for each of 13 tokens, of all ranks.
fn choices(rows: Range<usize>, device: &Device) -> AnyResult<Tensor> {
    let of = |t: usize| [(t * 5 + 1) % EXPERTS, (t * 5 + 1 + (t % 3 + 1) * 2) % EXPERTS];
    let ids: Vec<u32> = rows.clone().flat_map(of).map(|id| id as u32).collect();
    Ok(Tensor::from_vec(ids, (rows.len(), 2), device)?)
}

/// Numbers of this test that are the same however tokens are divided: rows of a table of 13.
fn table(own: u64, rows: &Range<usize>, width: usize, dtype: DType, device: &Device) -> AnyResult<Tensor> {
    Ok(normal(own, (13, width), dtype, &Device::Cpu)?.narrow(0, rows.start, rows.len())?.to_device(device)?)
}

fn variable(t: &Tensor) -> AnyResult<Var> {
    Ok(Var::from_tensor(t)?)
}

fn weighted(outputs: &Tensor, weights: &Tensor) -> candle_core::Result<Tensor> {
    outputs.broadcast_mul(&weights.unsqueeze(D::Minus1)?.to_dtype(outputs.dtype())?)
}

fn gradient(gradients: &GradStore, of: &Tensor) -> AnyResult<Vec<f32>> {
    flat(gradients.get(of).ok_or("no gradient")?)
}

/// Σ y·c: its gradient of y is c.
fn loss(y: &Tensor, c: &Tensor) -> candle_core::Result<Tensor> {
    // On the left: of empty tensors candle keeps that operand alone.
    (y * c)?.sum_all()
}

fn identity_experts_give_the_tokens_back(place: &Place) -> AnyResult<()> {
    for cuts in place.cuts() {
        on_ranks(place, cuts.len() - 1, |group| {
            let device = group.device();
            let moe = DispatchCombine::new(config(), group)?;
            let rows = cuts[group.rank()]..cuts[group.rank() + 1];
            let (x, c) =
                (variable(&table(50, &rows, H, DType::F32, device)?)?, table(51, &rows, H, DType::F32, device)?);
            let ids = choices(rows.clone(), device)?;

            // Halves, and their sum, are exact: y is x and d x is c to the bit.
            let weights = variable(&Tensor::full(0.5f32, (rows.len(), 2), device)?)?;
            let received = moe.dispatch(&x, &ids, &weights)?;
            let y = received.combine(&weighted(&received.rows, &received.weights)?)?;
            assert_eq!(flat(&y)?, flat(&x)?);
            let gradients = loss(&y, &c)?.backward()?;
            assert_eq!(gradient(&gradients, &x)?, flat(&c)?);
            // d w[t, k] = x[t] · c[t], a sum of 16 products: 16 roundings of 2⁻²⁴ relative to the sum of magnitudes.
            let (x64, c64) = (x.to_dtype(DType::F64)?, c.to_dtype(DType::F64)?);
            let products = (x64 * c64)?;
            let sums: Vec<f64> = products.sum(1)?.to_vec1()?;
            let sizes: Vec<f64> = products.abs()?.sum(1)?.to_vec1()?;
            let found = gradient(&gradients, &weights)?;
            for (at, found) in found.iter().enumerate() {
                let error = (f64::from(*found) - sums[at / 2]).abs();
                assert!(error <= 16.0 * 2f64.powi(-24) * sizes[at / 2], "weight {at}: {error}");
            }

            // Unweighted sums: each token comes back twice. The weights' gradient is zero, not absent.
            let received = moe.dispatch(&x, &ids, &weights)?;
            let y = received.combine(&received.rows)?;
            assert_eq!(flat(&y)?, flat(&(x.as_tensor() * 2.0)?)?);
            let gradients = loss(&y, &c)?.backward()?;
            assert_eq!(gradient(&gradients, &x)?, flat(&(&c * 2.0)?)?);
            assert!(gradient(&gradients, &weights)?.iter().all(|g| *g == 0.0));
            Ok(())
        })?;
    }
    Ok(())
}

fn rows_come_by_expert_in_the_order_of_tokens(place: &Place) -> AnyResult<()> {
    for cuts in place.cuts() {
        on_ranks(place, cuts.len() - 1, |group| {
            let device = group.device();
            let options = DispatchOptions { alignment: 4, capacity: Capacity::Static(CAPACITY), ..Default::default() };
            let layer = Layer::new(config(), 0)?.with_dispatch(options);
            let moe = DispatchCombine::new(layer, group)?;
            let rows = cuts[group.rank()]..cuts[group.rank() + 1];
            // Token t is made of t + 1, its weights are t + 1 and −(t + 1).
            let numbers: Vec<f32> = rows.clone().map(|t| t as f32 + 1.0).collect();
            let numbers = Tensor::from_vec(numbers, (rows.len(), 1), device)?;
            let x = numbers.broadcast_as((rows.len(), H))?;
            let weights = Tensor::cat(&[&numbers, &numbers.neg()?], 1)?;
            let received = moe.detached().dispatch(&x, &choices(rows, device)?, &weights)?;

            let all: Vec<Vec<u32>> = choices(0..13, &Device::Cpu)?.to_vec2()?;
            let mut expected = vec![(0.0, 0.0); CAPACITY];
            let (first, mut offset) = (group.rank() * group.local_experts(), 0);
            let segments = received.segments()?;
            for (e, segment) in segments.iter().enumerate() {
                let slots =
                    all.iter().enumerate().flat_map(|(t, ids)| ids.iter().enumerate().map(move |(k, id)| (t, k, *id)));
                let own: Vec<_> = slots.filter(|(_, _, id)| *id as usize == first + e).collect();
                assert_eq!(*segment, offset..offset + own.len());
                for (at, (t, k, _)) in own.into_iter().enumerate() {
                    let number = t as f32 + 1.0;
                    expected[offset + at] = (number, if k == 0 { number } else { -number });
                }
                offset += segment.len().next_multiple_of(4);
            }
            let (found, weights) = (received.rows.to_vec2::<f32>()?, received.weights.to_vec1::<f32>()?);
            for (slot, (row, weight)) in expected.into_iter().enumerate() {
                assert_eq!((&found[slot], weights[slot]), (&vec![row; H], weight), "slot {slot}");
            }
            let of = |t: Tensor| -> AnyResult<Vec<i64>> { Ok(t.to_vec1()?) };
            assert_eq!(of(received.offsets()?)?, segments.iter().map(|s| s.start as i64).collect::<Vec<_>>());
            assert_eq!(of(received.counts()?)?, segments.iter().map(|s| s.len() as i64).collect::<Vec<_>>());
            Ok(())
        })?;
    }
    Ok(())
}

/// y, d x, d router, d up, d down.
type Found = [Vec<f32>; 5];

/// One rank's part of a step of the module.
fn step_of_the_module(moe: &ExpertParallelMoE, x: &Var, c: &Tensor) -> AnyResult<Found> {
    let y = moe.forward(x)?;
    let gradients = loss(&y, c)?.backward()?;
    let of = |kind| gradient(&gradients, moe.param(kind).ok_or("a parameter")?);
    Ok([flat(&y)?, gradient(&gradients, x)?, of(ParamKind::Router)?, of(ParamKind::Up)?, of(ParamKind::Down)?])
}

/// Expert e as candle's operations, of the module's weights.
fn expert(moe: &ExpertParallelMoE, e: usize, rows: &Tensor) -> candle_core::Result<Tensor> {
    let weight = |kind| {
        let t = moe.param(kind).ok_or_else(|| candle_core::Error::msg("a parameter"))?;
        t.get(e)?.t()
    };
    let pre = rows.matmul(&weight(ParamKind::Up)?)?;
    let inner = moe.layer().config().intermediate;
    let hidden = (pre.narrow(1, 0, inner)?.silu()? * pre.narrow(1, inner, inner)?)?;
    hidden.matmul(&weight(ParamKind::Down)?)
}

/// The same step of dispatch, combine and candle's operations.
fn step_of_operations(moe: &ExpertParallelMoE, layer: Layer, x: &Var, c: &Tensor) -> AnyResult<Found> {
    let own = DispatchCombine::new(layer, moe.group())?;
    let router = moe.param(ParamKind::Router).ok_or("a router")?;
    let routed = own.route(&x.matmul(&router.t()?)?, None)?;
    let received = own.dispatch(x, &routed.ids, &routed.weights)?;
    let outputs = received.map_experts(|e, rows, weights| weighted(&expert(moe, e, rows)?, weights))?;
    let y = received.combine(&outputs)?;
    let gradients = loss(&y, c)?.backward()?;
    // An expert without rows has no gradient, and a rank without any has none for either weight.
    let of = |kind| -> AnyResult<Vec<f32>> {
        let t = moe.param(kind).ok_or("a parameter")?;
        gradients.get(t).map_or_else(|| Ok(vec![0.0; t.elem_count()]), flat)
    };
    Ok([flat(&y)?, gradient(&gradients, x)?, of(ParamKind::Router)?, of(ParamKind::Up)?, of(ParamKind::Down)?])
}

fn the_module_and_plain_operations_agree(place: &Place) -> AnyResult<()> {
    let limit = |order, renormalize| Some(ExpertCapacity { factor: 0.75, order, renormalize });
    let limited = |order, renormalize| {
        let mut config = config();
        config.router.expert_capacity = limit(order, renormalize);
        config
    };
    let wide = |payload| {
        let mut wide = config().with_payload(payload);
        wide.hidden = 32;
        wide
    };
    let fixed = DispatchOptions { alignment: 4, capacity: Capacity::Static(CAPACITY), ..Default::default() };
    let cases: [(&str, MoeConfig, DispatchOptions); 7] = [
        ("plain", config(), DispatchOptions::default()),
        ("padded", config(), DispatchOptions { alignment: 8, ..Default::default() }),
        ("static", config(), fixed),
        ("drops by position", limited(CapacityOrder::Position, false), DispatchOptions::default()),
        ("drops by probability", limited(CapacityOrder::Probability, true), DispatchOptions::default()),
        ("NVFP4", wide(Payload::Nvfp4), DispatchOptions::default()),
        ("MXFP8, static", wide(Payload::Mxfp8), fixed),
    ];
    for (name, config, options) in &cases {
        for cuts in place.cuts() {
            let routers = on_ranks(place, cuts.len() - 1, |group| {
                let device = group.device();
                let moe = of_type(group, config.clone(), DType::F32)?;
                let layer = moe.layer().clone().with_dispatch(*options);
                let moe = moe.with_layer(layer.clone());
                let rows = cuts[group.rank()]..cuts[group.rank() + 1];
                let x = wide_tokens(rows.clone(), config.hidden, DType::F32, device)?;
                let c = table(52, &rows, config.hidden, DType::F32, device)?;
                let expected = step_of_the_module(&moe, &x, &c)?;
                let found = step_of_operations(&moe, layer, &x, &c)?;
                for (at, what) in ["y", "d x", "d router", "d up", "d down"].iter().enumerate() {
                    if *what != "d router" {
                        close(&format!("{name}, {} ranks: {what}", cuts.len() - 1), &found[at], &expected[at]);
                    }
                }
                Ok((found[2].clone(), expected[2].clone()))
            })?;
            // A token's gradients of its two weights may be nearly equal, and of their difference, which is what reaches
            // the router, few digits are left. Among all ranks' tokens such a one counts little; among one rank's few, all.
            let (found, expected): (Vec<_>, Vec<_>) = routers.into_iter().unzip();
            close(&format!("{name}, {} ranks: d router", cuts.len() - 1), &found.concat(), &expected.concat());
        }
    }
    Ok(())
}

/// A model of f64: a router of its own, and experts tanh(rows · W) beside them.
struct Model {
    moe: DispatchCombine,
    router: Var,
    experts: Var,
}

impl Model {
    fn new(group: &DeviceGroup) -> AnyResult<Self> {
        let device = group.device();
        let (local, first) = (group.local_experts(), group.rank() * group.local_experts());
        let experts = (normal(61, (EXPERTS, H, H), DType::F64, device)? * 0.25)?;
        Ok(Self {
            moe: DispatchCombine::new(config(), group)?,
            router: variable(&normal(60, (H, EXPERTS), DType::F64, device)?)?,
            experts: variable(&experts.narrow(0, first, local)?.contiguous()?)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let routed = self.moe.route(&x.matmul(&self.router)?, None)?;
        let received = self.moe.dispatch(x, &routed.ids, &routed.weights)?;
        let outputs =
            received.map_experts(|e, rows, weights| weighted(&rows.matmul(&self.experts.get(e)?)?.tanh()?, weights))?;
        Ok((received.combine(&outputs)?, routed.ids))
    }
}

/// Steps of the differences, along a direction of numbers of order 1: shorter ones where a step changes the routing.
/// The loss is of order 10 and a sum of a few thousand roundings of 2⁻⁵³: over the shortest step 1e-14·10/1e-6 = 1e-7;
/// truncation is the longest's square times a third derivative of up to 1000 sums of order 1: 1e-7 as well.
const STEPS: [f64; 2] = [1e-5, 1e-6];
const TOLERANCE: f64 = 1e-5;

fn gradients_are_those_of_finite_differences() -> AnyResult<()> {
    let device = &Device::Cpu;
    for cuts in CUTS {
        let parts = on_ranks(&Place::Cpu, cuts.len() - 1, |group| {
            let model = Model::new(group)?;
            let rows = cuts[group.rank()]..cuts[group.rank() + 1];
            let x = variable(&table(62, &rows, H, DType::F64, device)?)?;
            let c = table(63, &rows, H, DType::F64, device)?;
            let (local, first) = (group.local_experts(), group.rank() * group.local_experts());
            let along = [
                table(64, &rows, H, DType::F64, device)?,
                normal(65, (H, EXPERTS), DType::F64, device)?,
                normal(66, (EXPERTS, H, H), DType::F64, device)?.narrow(0, first, local)?.contiguous()?,
            ];
            let (y, ids) = model.forward(&x)?;
            let gradients = loss(&y, &c)?.backward()?;
            let vars = [&x, &model.router, &model.experts];
            let mut slope = 0.0;
            for (var, along) in vars.iter().zip(&along) {
                let gradient = gradients.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?;
                slope += (gradient * along)?.sum_all()?.to_scalar::<f64>()?;
            }
            let at: Vec<Tensor> = vars.iter().map(|v| v.copy()).collect::<Result<_, _>>()?;
            let mut differences = Vec::new();
            for step in STEPS {
                let mut values = [0.0; 2];
                let mut same = true;
                for (value, sign) in values.iter_mut().zip([1.0, -1.0]) {
                    for ((var, at), along) in vars.iter().zip(&at).zip(&along) {
                        var.set(&(at + (along * (sign * step))?)?)?;
                    }
                    let (y, now) = model.forward(&x)?;
                    same &= now.to_vec2::<u32>()? == ids.to_vec2::<u32>()?;
                    *value = loss(&y, &c)?.to_scalar::<f64>()?;
                }
                differences.push(((values[0] - values[1]) / (2.0 * step), same));
            }
            Ok((slope, differences))
        })?;
        let slope: f64 = parts.iter().map(|(slope, _)| slope).sum();
        let usable = (0..STEPS.len()).find(|at| parts.iter().all(|(_, found)| found[*at].1));
        let at = usable.ok_or("the routing changes within every step")?;
        let expected: f64 = parts.iter().map(|(_, found)| found[at].0).sum();
        let error = (slope - expected).abs() / expected.abs().max(1.0);
        assert!(error <= TOLERANCE, "{} ranks: {slope} for {expected}", cuts.len() - 1);
        assert!(expected.abs() > 1e-3, "a slope that shows something: {expected}");
    }
    Ok(())
}

/// Forward of a microbatch: its loss, and what its gradients are of.
fn microbatch(moe: &DispatchCombine, scale: &Var, own: u64, rows: &Range<usize>) -> AnyResult<(Tensor, [Var; 2])> {
    let device = moe.group().device();
    let x = variable(&table(own, rows, H, DType::F32, device)?)?;
    let weights = variable(&table(own + 1, rows, 2, DType::F32, device)?)?;
    let received = moe.dispatch(&x, &choices(rows.clone(), device)?, &weights)?;
    let outputs = weighted(&received.rows.broadcast_mul(scale)?, &received.weights)?;
    let y = received.combine(&outputs)?;
    Ok((loss(&y, &table(own + 2, rows, H, DType::F32, device)?)?, [x, weights]))
}

fn several_in_flight_are_each_their_own(place: &Place) -> AnyResult<()> {
    for cuts in place.cuts() {
        on_ranks(place, cuts.len() - 1, |group| {
            let device = group.device();
            let moe = DispatchCombine::new(config(), group)?;
            let rows = cuts[group.rank()]..cuts[group.rank() + 1];
            let scale = variable(&normal(70, H, DType::F32, device)?)?;
            let forward = |n: u64| microbatch(&moe, &scale, 71 + 3 * n, &rows);
            let backward = |(loss, vars): (Tensor, [Var; 2])| -> AnyResult<Vec<Vec<f32>>> {
                let gradients = loss.backward()?;
                let scale = gradients.get(&scale).map_or_else(|| Ok(vec![0.0; H]), flat)?;
                Ok(vec![gradient(&gradients, &vars[0])?, gradient(&gradients, &vars[1])?, scale])
            };
            let apart = (0..3).map(|n| backward(forward(n)?)).collect::<AnyResult<Vec<_>>>()?;
            // 1F1B: F0 F1 B0 F2 B1 B2.
            let (f0, f1) = (forward(0)?, forward(1)?);
            let b0 = backward(f0)?;
            let f2 = forward(2)?;
            assert_eq!(vec![b0, backward(f1)?, backward(f2)?], apart);
            // All in one graph.
            let (f0, f1) = (forward(0)?, forward(1)?);
            let gradients = (f0.0 + f1.0)?.backward()?;
            for (n, [x, weights]) in [f0.1, f1.1].iter().enumerate() {
                assert_eq!([gradient(&gradients, x)?, gradient(&gradients, weights)?], apart[n][..2]);
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// All tokens go to the first expert; on other ranks nothing arrives, and nothing but the anchor is tracked there.
fn ranks_without_rows_and_without_tracking_take_part(place: &Place) -> AnyResult<()> {
    for cuts in place.cuts() {
        on_ranks(place, cuts.len() - 1, |group| {
            let device = group.device();
            let moe = DispatchCombine::new(MoeConfig::new(H, 24, EXPERTS, 1), group)?;
            let rows = cuts[group.rank()]..cuts[group.rank() + 1];
            let x = table(80, &rows, H, DType::F32, device)?;
            let weights = Tensor::ones((rows.len(), 1), DType::F32, device)?;
            let ids = Tensor::zeros((rows.len(), 1), DType::U32, device)?;
            let scale = variable(&Tensor::full(3f32, H, device)?)?;
            let received = moe.dispatch(&x, &ids, &weights)?;
            let outputs = received.map_experts(|_, rows, _| rows.broadcast_mul(&scale))?;
            let y = received.combine(&outputs)?;
            assert_eq!(flat(&y)?, flat(&(&x * 3.0)?)?);
            let gradients = y.sum_all()?.backward()?;
            assert!(gradients.get(&x).is_none());
            assert_eq!(gradients.get(&scale).is_some(), group.rank() == 0);
            if group.rank() == 0 {
                // Of all ranks' tokens.
                let all = table(80, &(0..13), H, DType::F32, device)?.sum(0)?;
                close("d scale", &gradient(&gradients, &scale)?, &flat(&all)?);
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// A dispatch that is given something else by the last rank.
fn bad_dispatch(moe: &DispatchCombine, bad: &str) -> AnyResult<candle_core::Result<Dispatched>> {
    let device = moe.group().device();
    let f32s = |dims: (usize, usize)| Tensor::ones(dims, DType::F32, device);
    let (mut x, mut ids, mut weights) = (f32s((4, H))?, choices(0..4, device)?, f32s((4, 2))?);
    match bad {
        "width" => x = f32s((4, H + 1))?,
        "cube" => x = x.reshape((2, 2, H))?,
        "integer x" => x = x.to_dtype(DType::U32)?,
        "x and weights of another type" => (x, weights) = (x.to_dtype(DType::F64)?, weights.to_dtype(DType::F64)?),
        "bf16 weights" => weights = weights.to_dtype(DType::BF16)?,
        "more weights" => weights = f32s((4, 3))?,
        "fewer ids" => ids = choices(0..3, device)?,
        "floating ids" => ids = ids.to_dtype(DType::F32)?,
        "an expert too far" => ids = Tensor::full(EXPERTS as u32, (4, 2), device)?,
        "an expert twice" => ids = Tensor::zeros((4, 2), DType::U32, device)?,
        other => return Err(format!("no such case: {other}").into()),
    }
    Ok(moe.dispatch(&x, &ids, &weights))
}

fn good(moe: &DispatchCombine) -> AnyResult<Dispatched> {
    let device = moe.group().device();
    let ones = |dims| Tensor::ones(dims, DType::F32, device);
    Ok(moe.dispatch(&ones((4, H))?, &choices(0..4, device)?, &ones((4, 2))?)?)
}

/// A whole step, after which the group must be usable.
fn whole(moe: &DispatchCombine) -> AnyResult<()> {
    let received = good(moe)?;
    received.combine(&received.rows)?.sum_all()?.backward()?;
    Ok(())
}

/// The last rank's error is typed; that of the others names the rank.
fn refused(name: &str, rank: usize, last: usize, error: &candle_core::Error) {
    let own = error_of(error).unwrap_or_else(|| panic!("{name}, rank {rank}: {error}"));
    let as_meant = match own {
        Error::Peer { peer, .. } => rank != last && *peer == last,
        Error::ConfigMismatch { .. } => name == "x and weights of another type",
        Error::ExpertId { rank: culprit, .. } => *culprit == last,
        Error::Invalid { .. } | Error::Shape { .. } | Error::DType { .. } => rank == last,
        _ => false,
    };
    assert!(as_meant, "{name}, rank {rank}: {own:?}");
}

fn wrong_tensors_are_typed_errors_on_every_rank(place: &Place) -> AnyResult<()> {
    let dispatches = [
        "width",
        "cube",
        "integer x",
        "x and weights of another type",
        "bf16 weights",
        "more weights",
        "fewer ids",
        "floating ids",
        "an expert too far",
        "an expert twice",
    ];
    for count in place.cuts().into_iter().map(|cuts| cuts.len() - 1) {
        let last = count - 1;
        on_ranks(place, count, |group| {
            let device = group.device();
            let moe = DispatchCombine::new(config(), group)?;
            for bad in dispatches {
                // Alone, f64 tokens are as good as any; a GPU tells of ids later.
                if count == 1 && bad == "x and weights of another type" || !place.is_cpu() && bad.starts_with("an ") {
                    continue;
                }
                let made = if group.rank() == last { bad_dispatch(&moe, bad)? } else { good(&moe).map_err(as_candle) };
                let error = made.err().ok_or_else(|| format!("{bad}: taken"))?;
                refused(bad, group.rank(), last, &error);
                whole(&moe)?;
            }
            for bad in ["type", "width", "rows", "flat"] {
                let received = good(&moe)?;
                let n = received.rows.dims()[0];
                let outputs = match (group.rank() == last, bad) {
                    (true, "type") => received.rows.to_dtype(DType::BF16)?,
                    (true, "width") => Tensor::zeros((n, H - 1), DType::F32, device)?,
                    (true, "rows") => Tensor::zeros((n + 1, H), DType::F32, device)?,
                    (true, _) => received.rows.flatten_all()?,
                    _ => received.rows.clone(),
                };
                let error = received.combine(&outputs).err().ok_or_else(|| format!("{bad}: taken"))?;
                refused(bad, group.rank(), last, &error);
                whole(&moe)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Into memory of the caller's: the values of candle's own, at the same addresses each time.
fn outputs_in_given_memory_have_the_same_values(place: &Place) -> AnyResult<()> {
    for cuts in place.cuts() {
        on_ranks(place, cuts.len() - 1, |group| {
            let rows = cuts[group.rank()]..cuts[group.rank() + 1];
            let options = DispatchOptions { capacity: Capacity::Static(CAPACITY), ..Default::default() };
            let layer = Layer::new(config(), 0)?.with_dispatch(options);
            let moe = DispatchCombine::new(layer, group)?.detached();
            let device = group.device();
            let (x, ids) = (table(3, &rows, H, DType::F32, device)?, choices(rows.clone(), device)?);
            let weights = table(4, &rows, 2, DType::F32, device)?;
            let (into, of) = (poisoned((CAPACITY, H), device)?, poisoned(CAPACITY, device)?);
            let y = poisoned((rows.len(), H), device)?;
            for _ in 0..2 {
                let expected = moe.dispatch(&x, &ids, &weights)?;
                let outputs = DispatchedRowsMut { rows: &into, weights: &of };
                let found = moe.dispatch_into(&x, &ids, &weights, outputs)?;
                assert_eq!(flat(&into)?, flat(&expected.rows)?);
                assert_eq!(flat(&of)?, flat(&expected.weights)?);
                assert_eq!(flat(&found.rows)?, flat(&into)?, "the rows are that memory");
                assert_eq!(found.segments()?, expected.segments()?);
                let outputs = weighted(&found.rows, &found.weights)?;
                found.combine_into(&outputs, &y)?;
                assert_eq!(flat(&y)?, flat(&expected.combine(&outputs)?)?);
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn poisoned(shape: impl Into<candle_core::Shape>, device: &Device) -> AnyResult<Tensor> {
    Ok(Tensor::full(f32::NAN, shape, device)?)
}

/// Memory that does not fit: typed, on every rank, and the group goes on.
fn memory_that_does_not_fit_is_refused(place: &Place) -> AnyResult<()> {
    const TOKENS: usize = 5;
    let count = place.count();
    let wrong = ["rows", "type", "weights", "layout", "x's own", "one for both", "tracked", "y", "y's own"];
    for (number, wrong) in wrong.into_iter().enumerate() {
        let failed = on_ranks(place, count, |group| {
            let (device, last) = (group.device(), group.rank() == count - 1);
            let options = DispatchOptions { capacity: Capacity::Static(CAPACITY), ..Default::default() };
            let layer = Layer::new(config(), number as u32)?.with_dispatch(options);
            let tracked = DispatchCombine::new(layer, group)?;
            let moe = tracked.detached();
            let (x, ids) = (poisoned((TOKENS, H), device)?.zeros_like()?, choices(0..TOKENS, device)?);
            let weights = table(4, &(0..TOKENS), 2, DType::F32, device)?;
            let [mut rows, mut of] = [poisoned((CAPACITY, H), device)?, poisoned(CAPACITY, device)?];
            let mut y = poisoned((TOKENS, H), device)?;
            let outputs = poisoned((CAPACITY, H), device)?.zeros_like()?;
            match wrong {
                _ if !last => {}
                "rows" => rows = poisoned((CAPACITY - 1, H), device)?,
                "type" => rows = rows.to_dtype(DType::F64)?,
                "weights" => of = poisoned(CAPACITY + 1, device)?,
                "layout" => rows = poisoned((H, CAPACITY), device)?.t()?,
                "x's own" => rows = x.clone(),
                "one for both" => of = rows.flatten_all()?.narrow(0, 0, CAPACITY)?,
                "y" => y = poisoned((TOKENS, H + 1), device)?,
                "y's own" => y = outputs.clone(),
                _ => {}
            }
            let into = DispatchedRowsMut { rows: &rows, weights: &of };
            let with = if last && wrong == "tracked" { &tracked } else { &moe };
            let result =
                with.dispatch_into(&x, &ids, &weights, into).and_then(|found| found.combine_into(&outputs, &y));
            let error = result.expect_err(wrong);
            assert!(error_of(&error).is_some(), "{wrong}: {error}");
            let text = error.to_string();
            // The group goes on.
            let [rows, of] = [poisoned((CAPACITY, H), device)?, poisoned(CAPACITY, device)?];
            let into = DispatchedRowsMut { rows: &rows, weights: &of };
            let found = moe.dispatch_into(&x, &ids, &weights, into)?;
            found.combine_into(&outputs, &poisoned((TOKENS, H), device)?)?;
            Ok(text)
        })?;
        let own = &failed[count - 1];
        assert!(own.contains("_into") || own.contains("outputs"), "{wrong}: {own}");
    }
    Ok(())
}

/// candle's error again, which the helpers box.
fn as_candle(error: crate::support::AnyError) -> candle_core::Error {
    match error.downcast::<candle_core::Error>() {
        Ok(error) => *error,
        Err(other) => candle_core::Error::msg(other),
    }
}

fn a_layer_that_the_group_has_no_experts_for_is_refused(place: &Place) -> AnyResult<()> {
    on_ranks(place, place.count(), |group| {
        let error = DispatchCombine::new(MoeConfig::new(H, 24, EXPERTS * 2, 2), group).err().ok_or("taken")?;
        assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
        Ok(())
    })?;
    Ok(())
}

fn a_second_backward_is_an_error_before_any_collective(place: &Place) -> AnyResult<()> {
    let count = place.count();
    on_ranks(place, count, |group| {
        let moe = DispatchCombine::new(config(), group)?;
        let received = good(&moe)?;
        let loss = received.combine(&received.rows)?.sum_all()?;
        loss.backward()?;
        let calls = || group.on::<Cpu>().map(|group| group.lock().dispatcher().communicator().calls());
        let before = calls();
        let error = loss.backward().err().ok_or("taken")?;
        assert!(matches!(error_of(&error), Some(Error::ContextConsumed { .. })), "{error}");
        assert_eq!(calls(), before);
        whole(&moe)
    })?;
    Ok(())
}

fn a_rank_that_is_detached_agrees_to_no_backward(place: &Place) -> AnyResult<()> {
    let count = place.count();
    on_ranks(place, count, |group| {
        let moe = DispatchCombine::new(config(), group)?;
        let frozen = group.rank() == count - 1;
        let used = if frozen { moe.detached() } else { moe.clone() };
        let received = good(&used)?;
        let y = received.combine(&received.rows)?;
        assert_eq!(y.track_op(), !frozen);
        if !frozen {
            let error = y.sum_all()?.backward().err().ok_or("taken")?;
            assert!(
                matches!(error_of(&error), Some(Error::BackwardNotAgreed { absent, .. }) if absent == &[count - 1]),
                "{error}"
            );
        }
        whole(&moe)
    })?;
    Ok(())
}

fn a_rank_that_fails_among_its_experts_tells_the_others() -> AnyResult<()> {
    on_ranks(&Place::Cpu, 2, |group| {
        let moe = DispatchCombine::new(config(), group)?;
        let received = good(&moe)?;
        if group.rank() == 1 {
            moe.refuse("no adapter for expert 5");
        } else {
            let error = received.combine(&received.rows).err().ok_or("taken")?;
            assert!(error.to_string().contains("no adapter for expert 5"), "{error}");
            refused("refuse", 0, 1, &error);
        }
        whole(&moe)
    })?;
    Ok(())
}

/// A number of rows that is not the expert's would shift those behind it; another width or type is no output of combine.
fn experts_that_give_other_rows_are_typed_errors() -> AnyResult<()> {
    type Made = fn(&Tensor) -> candle_core::Result<Tensor>;
    let cases: [(Made, &str); 4] = [
        (|rows| Tensor::cat(&[rows, rows], 0), "rows of expert"),
        (|rows| rows.narrow(1, 0, H - 1), "rows of expert"),
        (|rows| rows.unsqueeze(0), "rows of expert"),
        (|rows| rows.to_dtype(DType::F64), "type of expert"),
    ];
    for (made, expected) in cases {
        on_ranks(&Place::Cpu, 2, |group| {
            let moe = DispatchCombine::new(config(), group)?;
            let received = good(&moe)?;
            if group.rank() == 1 {
                let error = received.map_experts(|_, rows, _| made(rows)).expect_err("other rows");
                let named = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name.starts_with(expected));
                assert!(named, "{error}");
            } else {
                let error = received.combine(&received.rows).err().ok_or("taken")?;
                assert!(error.to_string().contains(expected), "{error}");
            }
            whole(&moe)
        })?;
    }
    Ok(())
}

fn a_router_that_fails_tells_the_others() -> AnyResult<()> {
    on_ranks(&Place::Cpu, 2, |group| {
        let moe = DispatchCombine::new(config(), group)?;
        let device = group.device();
        for bad in ["NaN", "width", "type", "bias"] {
            let logits = |value: f32, width| Tensor::full(value, (4, width), device);
            let bias = Tensor::zeros(EXPERTS, DType::F32, device)?;
            let error = match (group.rank(), bad) {
                (1, "NaN") => moe.route(&logits(f32::NAN, EXPERTS)?, None).err(),
                (1, "width") => moe.route(&logits(0.0, EXPERTS + 1)?, None).err(),
                (1, "type") => moe.route(&logits(0.0, EXPERTS)?.to_dtype(DType::BF16)?, None).err(),
                (1, _) => moe.route(&logits(0.0, EXPERTS)?, Some(&bias)).err(),
                _ => good(&moe).map_err(as_candle).err(),
            };
            let error = error.ok_or_else(|| format!("{bad}: taken"))?;
            match error_of(&error) {
                Some(Error::Peer { peer: 1, .. }) if group.rank() == 0 => {}
                Some(own) if group.rank() == 1 && !matches!(own, Error::Peer { .. }) => {}
                _ => panic!("{bad}, rank {}: {error}", group.rank()),
            }
            whole(&moe)?;
        }
        Ok(())
    })?;
    Ok(())
}

/// A test of CPU ranks by name.
type CpuCase = (&'static str, fn() -> AnyResult<()>);

/// Tests of CPU ranks: in f64, or of a failure that is met before a device matters.
pub fn cpu_cases() -> [CpuCase; 4] {
    [
        ("gradients_are_those_of_finite_differences", gradients_are_those_of_finite_differences),
        ("a_rank_that_fails_among_its_experts_tells_the_others", a_rank_that_fails_among_its_experts_tells_the_others),
        ("experts_that_give_other_rows_are_typed_errors", experts_that_give_other_rows_are_typed_errors),
        ("a_router_that_fails_tells_the_others", a_router_that_fails_tells_the_others),
    ]
}

tests! {
    fn(&Place) -> AnyResult<()>;
    identity_experts_give_the_tokens_back,
    rows_come_by_expert_in_the_order_of_tokens,
    the_module_and_plain_operations_agree,
    several_in_flight_are_each_their_own,
    outputs_in_given_memory_have_the_same_values,
    memory_that_does_not_fit_is_refused,
    ranks_without_rows_and_without_tracking_take_part,
    wrong_tensors_are_typed_errors_on_every_rank,
    a_layer_that_the_group_has_no_experts_for_is_refused,
    a_second_backward_is_an_error_before_any_collective,
    a_rank_that_is_detached_agrees_to_no_backward,
}
