//! Routing: closed forms, a straight-line reference, finite differences and the goldens.

mod aux_losses;
mod cases;
#[path = "../devices/mod.rs"]
mod devices;
mod golden;
mod gradient;
mod reference;
mod register_kernel;

use devices::Target;
use moebius::config::{AuxConfig, BalanceKind, GroupLimit, GroupScore, Renorm, RouterConfig, Score};
use moebius::ep::Reporting;
use moebius::kernels::{AuxBwd, AuxSums, AuxTotal, Jitter, Origin, RenormalizeKept, Route, RouteBwd, Scalar};
use moebius::{DType, Error, Result, Tensor};

/// Origin that errors name.
const ORIGIN: Origin = Origin { rank: 3, layer: 7 };

/// Every body of the suite.
pub fn cases<D: Target>() -> devices::Cases<D> {
    [
        cases::cases(),
        aux_losses::cases(),
        reference::cases(),
        gradient::cases(),
        register_kernel::cases(),
        golden::cases(),
    ]
    .concat()
}

/// A router of `experts` choosing `top_k`, without renormalization.
fn router(experts: usize, top_k: usize, score: Score) -> RouterConfig {
    let mut c = RouterConfig::new(experts, top_k);
    c.score = score;
    c.renorm = None;
    c
}

fn renorm(epsilon: f64) -> Option<Renorm> {
    Some(Renorm { p: 1.0, epsilon, floor: 0.0 })
}

fn groups(groups: usize, keep: usize, rank_by: GroupScore) -> Option<GroupLimit> {
    Some(GroupLimit { groups, keep, rank_by })
}

/// A device and the type to route in. Values are f64 at this interface, which holds every type exactly.
struct On<D: Target> {
    device: D,
    dtype: DType,
}

/// Results of a call of the router.
struct Routed {
    /// The call itself said nothing.
    returned: bool,
    settled: Result<()>,
    ids: Vec<i32>,
    weights: Vec<f64>,
}

/// Sums of the auxiliary losses that a gradient needs: the losses, the sums, the loss's own gradient.
type AuxGrad<'a> = Option<(&'a AuxConfig, &'a [f64], f64)>;

impl<D: Target> On<D> {
    /// The device's widest type.
    fn wide(device: &D) -> Self {
        Self { device: device.clone(), dtype: D::wide() }
    }

    fn f32(device: &D) -> Self {
        Self { device: device.clone(), dtype: DType::F32 }
    }

    fn put(&self, values: &[f64], dims: &[usize]) -> Result<Tensor<D>> {
        self.device.write(values, self.dtype, dims)
    }

    fn ids(&self, ids: &[i32], dims: &[usize]) -> Result<Tensor<D>> {
        Ok(self.device.host(&Tensor::from_vec(ids.to_vec(), dims)?))
    }

    fn empty(&self, dims: &[usize]) -> Result<Tensor<D>> {
        Tensor::empty(&self.device, self.dtype, dims)
    }

    fn done(&self, result: Result<()>, out: &Tensor<D>) -> Result<Vec<f64>> {
        self.device.settled(result)?;
        Ok(self.device.values(out.view()))
    }

    /// Ids and weights, `[T, K]`.
    fn route(
        &self,
        c: &RouterConfig,
        logits: &[f64],
        bias: Option<&[f64]>,
        jitter: Option<Jitter>,
    ) -> Result<(Vec<i32>, Vec<f64>)> {
        let routed = self.routed(c, logits, (bias, jitter), Reporting::Immediate)?;
        routed.settled?;
        Ok((routed.ids, routed.weights))
    }

    /// Results of a call, with its outputs whatever that is.
    fn routed(
        &self,
        c: &RouterConfig,
        logits: &[f64],
        (bias, jitter): (Option<&[f64]>, Option<Jitter>),
        reporting: Reporting,
    ) -> Result<Routed> {
        let (e, k) = (c.num_experts, c.top_k);
        let t = logits.len() / e;
        let logits = self.put(logits, &[t, e])?;
        let bias = bias.map(|b| self.put(b, &[b.len()])).transpose()?;
        let mut ids = Tensor::empty(&self.device, DType::I32, &[t, k])?;
        let mut weights = self.empty(&[t, k])?;
        let call = Route {
            config: c,
            logits: logits.view(),
            selection_bias: bias.as_ref().map(Tensor::view),
            jitter,
            origin: ORIGIN,
            reporting,
            ids: ids.view_mut(),
            weights: weights.view_mut(),
        };
        let result = self.device.route(call);
        let returned = result.is_ok();
        // Before a read, which would be told.
        let settled = self.device.settled(result);
        let ids = self.device.values(ids.view()).into_iter().map(|id| id as i32).collect();
        Ok(Routed { returned, settled, ids, weights: self.device.values(weights.view()) })
    }

    /// Gradient of the logits, `[T, E]`.
    fn route_bwd(
        &self,
        c: &RouterConfig,
        logits: &[f64],
        ids: &[i32],
        d_weights: &[f64],
        jitter: Option<Jitter>,
        aux: AuxGrad<'_>,
    ) -> Result<Vec<f64>> {
        let (e, k) = (c.num_experts, c.top_k);
        let t = logits.len() / e;
        let (logits, ids) = (self.put(logits, &[t, e])?, self.ids(ids, &[t, k])?);
        let d_weights = self.put(d_weights, &[t, k])?;
        let sums = aux.map(|(_, sums, _)| self.put(sums, &[sums.len()])).transpose()?;
        let run = |d_loss: Scalar<'_, D>| {
            let mut d_logits = self.empty(&[t, e])?;
            let call = RouteBwd {
                config: c,
                logits: logits.view(),
                jitter,
                ids: ids.view(),
                d_weights: d_weights.view(),
                aux: aux.zip(sums.as_ref()).map(|((aux, ..), sums)| {
                    let d_loss = d_loss.borrow();
                    AuxBwd { aux, sums: sums.view(), d_loss }
                }),
                origin: ORIGIN,
                d_logits: d_logits.view_mut(),
            };
            self.done(self.device.route_bwd(call), &d_logits)
        };
        let Some((.., d_loss)) = aux else { return run(0.0.into()) };
        // The loss's own gradient as the device has it, and as a number of the host: the same bits.
        let on_device = self.put(&[d_loss], &[])?;
        let found = run(on_device.view().into())?;
        let from_host = run(self.device.values(on_device.view())[0].into())?;
        let bits = |v: &[f64]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found), bits(&from_host));
        Ok(found)
    }

    /// The losses' sum, from their sums.
    fn aux_total(&self, c: &RouterConfig, aux: &AuxConfig, sums: &[f64]) -> Result<f64> {
        let (sums, mut out) = (self.put(sums, &[sums.len()])?, self.empty(&[])?);
        let call = AuxTotal { config: c, aux, sums: sums.view(), out: out.view_mut() };
        Ok(self.done(self.device.aux_total(call), &out)?[0])
    }

    /// The sums, `[2·E + 4]`.
    fn aux_sums(&self, c: &RouterConfig, aux: &AuxConfig, logits: &[f64], ids: &[i32]) -> Result<Vec<f64>> {
        let (e, k) = (c.num_experts, c.top_k);
        let t = logits.len() / e;
        let (logits, ids) = (self.put(logits, &[t, e])?, self.ids(ids, &[t, k])?);
        let mut out = self.empty(&[2 * e + 4])?;
        let call =
            AuxSums { config: c, aux, logits: logits.view(), ids: ids.view(), origin: ORIGIN, out: out.view_mut() };
        self.done(self.device.aux_sums(call), &out)
    }

    fn renormalize_kept(&self, k: usize, weights: &[f64], kept: &[i32], grad: Option<&[f64]>) -> Result<Vec<f64>> {
        let dims = [weights.len() / k, k];
        let (weights, kept) = (self.put(weights, &dims)?, self.ids(kept, &dims)?);
        let grad = grad.map(|g| self.put(g, &dims)).transpose()?;
        let mut out = self.empty(&dims)?;
        let call = RenormalizeKept {
            weights: weights.view(),
            kept: kept.view(),
            grad: grad.as_ref().map(Tensor::view),
            out: out.view_mut(),
        };
        self.done(self.device.renormalize_kept(call), &out)
    }
}

fn balance(kind: BalanceKind, balance: f64, z: f64) -> AuxConfig {
    let mut aux = AuxConfig::default();
    (aux.balance_kind, aux.balance, aux.z) = (kind, balance, z);
    aux
}

/// Seeded numbers for tests.
struct Numbers(u64);

impl Numbers {
    /// Numbers of a place's own number.
    fn new(own: u64) -> Self {
        Self(devices::seed::seed(own))
    }
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) ^ self.0
    }
    /// Uniform in −1..1.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 20) as f64 / (1u64 << 43) as f64 - 1.0
    }
    fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 20) as usize % n
    }
    /// Spread like logits, about ±3.
    fn logits(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| 1.5 * (self.unit() + self.unit() + self.unit())).collect()
    }
}

fn close(name: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{name}: length");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let error = (g - w).abs();
        assert!(error <= tolerance, "{name}[{i}]: {g} instead of {w}, off by {error:e} (tolerance {tolerance:e})");
    }
}

/// ‖a − b‖ / ‖b‖.
fn relative(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}
