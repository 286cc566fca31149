//! Values and gradients: closed forms, the module's, finite differences, several in flight.

use super::*;

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

pub(super) fn gradients_are_those_of_finite_differences() -> AnyResult<()> {
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

tests! {
    fn(&Place) -> AnyResult<()>;
    identity_experts_give_the_tokens_back,
    rows_come_by_expert_in_the_order_of_tokens,
    the_module_and_plain_operations_agree,
    several_in_flight_are_each_their_own,
    ranks_without_rows_and_without_tracking_take_part,
}
