//! Each grouped GEMM alone, with what is fused into it.

use moebius::config::{Activation, WeightAt};
use moebius::cuda::Cuda;
use moebius::kernels::*;
use moebius::weights::Weight;
use moebius::{DType, Result, Tensor};

use crate::Workload;
use crate::data::{Random, slots};
use crate::output::complain;
use crate::report::{Report, SETS};

/// Rows in and out of the experts, of one routing.
struct Set {
    x: Tensor<Cuda>,
    segments: Segments<Cuda>,
    map: Tensor<Cuda>,
    pre: Tensor<Cuda>,
    hidden: Tensor<Cuda>,
    out: Tensor<Cuda>,
}

/// The products of a workload.
pub struct Gemms<'a> {
    cuda: &'a Cuda,
    report: &'a Report,
    w: &'a Workload,
    sets: Vec<Set>,
    weights: Tensor<Cuda>,
}

pub fn run(cuda: &Cuda, report: &Report, w: &Workload) -> Result<()> {
    let mut random = Random(1);
    let mut gemms = Gemms::new(cuda, report, w, &mut random)?;
    let [up, down] = experts(cuda, w, &mut random)?;
    let experts = || [up.view().into(), down.view().into()];
    gemms.forward(cuda, experts(), "")?;
    gemms.backward(cuda, experts(), "")?;
    gemms.weight_gradients(&up, &down)
}

/// Weights of up and down.
pub fn experts(cuda: &Cuda, w: &Workload, random: &mut Random) -> Result<[Tensor<Cuda>; 2]> {
    let up = random.tensor(cuda, &[w.experts, 2 * w.inner, w.hidden], (w.hidden as f64).powf(-0.5))?;
    let down = random.tensor(cuda, &[w.experts, w.hidden, w.inner], (w.inner as f64).powf(-0.5))?;
    Ok([up, down])
}

impl<'a> Gemms<'a> {
    pub fn new(cuda: &'a Cuda, report: &'a Report, w: &'a Workload, random: &mut Random) -> Result<Self> {
        let n = w.slots();
        let sets = (0..SETS)
            .map(|_| {
                let (segments, map) = slots(cuda, w, &random.experts(w))?;
                Ok(Set {
                    x: random.tensor(cuda, &[w.tokens, w.hidden], 1.0)?,
                    segments,
                    map,
                    pre: random.tensor(cuda, &[n, 2 * w.inner], 1.0)?,
                    hidden: random.tensor(cuda, &[n, w.inner], 0.5)?,
                    out: Tensor::empty(cuda, DType::BF16, &[n, w.hidden])?,
                })
            })
            .collect::<Result<_>>()?;
        let weights = Tensor::from_vec(vec![1.0 / w.top_k as f32; n], &[n])?.to(cuda)?;
        Ok(Self { cuda, report, w, sets, weights })
    }

    /// Milliseconds of a call, and their line.
    fn time(
        &mut self,
        phase: &str,
        flop: f64,
        mut call: impl FnMut(&mut Set, &Tensor<Cuda>) -> Result<()>,
    ) -> Result<f64> {
        let Self { report, sets, weights, .. } = self;
        let ms = report.time(|set| call(&mut sets[set], weights))?;
        self.report.line(self.w, phase, ms, flop);
        Ok(ms)
    }

    /// Milliseconds of up and down with these weights, on a device that has the sets' GPU.
    pub fn forward(&mut self, cuda: &Cuda, [up, down]: [Weight<'_, Cuda>; 2], suffix: &str) -> Result<f64> {
        let flop = self.w.flop_down();
        let mut up_ms = [0.0; 2];
        for ((phase, keep), ms) in [("gemm1", false), ("gemm1+pre", true)].into_iter().zip(&mut up_ms) {
            *ms = self.time(&format!("{phase}{suffix}"), 2.0 * flop, |set, weights| {
                let call = Up {
                    rows: RowSource::mapped(set.x.view(), set.map.view()),
                    segments: &set.segments,
                    weight: up.borrow(),
                    bias: None,
                    slot_weights: Some(SlotWeights { values: weights.view(), map: None, at: WeightAt::Activation }),
                    activation: Activation::SiluGlu,
                    pre: keep.then(|| set.pre.view_mut()),
                    out: RowDest::direct(set.hidden.view_mut()),
                    movement_sms: None,
                };
                cuda.up(call)
            })?;
        }
        let down_ms = self.time(&format!("gemm2{suffix}"), flop, |set, weights| {
            let call = Down {
                rows: RowSource::direct(set.hidden.view()),
                segments: &set.segments,
                weight: down.borrow(),
                bias: None,
                slot_weights: Some(SlotWeights { values: weights.view(), map: None, at: WeightAt::Activation }),
                out: RowDest::direct(set.out.view_mut()),
            };
            cuda.down(call)
        })?;
        Ok(up_ms[0] + down_ms)
    }

    /// The same of the gradients with respect to rows.
    pub fn backward(&mut self, cuda: &Cuda, [up, down]: [Weight<'_, Cuda>; 2], suffix: &str) -> Result<f64> {
        let n = self.w.slots();
        let mut d_pre = Tensor::empty(cuda, DType::BF16, &[n, 2 * self.w.inner])?;
        let mut d_weights = Tensor::empty(cuda, DType::F32, &[n])?;
        let flop = self.w.flop_down();
        let down_ms = self.time(&format!("dgrad2{suffix}"), flop, |set, weights| {
            let call = DownBwd {
                grad: RowSource::mapped(set.x.view(), set.map.view()),
                segments: &set.segments,
                weight: down.borrow(),
                bias: None,
                pre: set.pre.view(),
                slot_weights: Some(SlotWeights { values: weights.view(), map: None, at: WeightAt::Activation }),
                activation: Activation::SiluGlu,
                d_pre: d_pre.view_mut(),
                hidden: Some(set.hidden.view_mut()),
                d_slot_weights: Some(d_weights.view_mut()),
            };
            cuda.down_bwd(call)
        })?;
        let up_ms = self.time(&format!("dgrad1{suffix}"), 2.0 * flop, |set, _| {
            let call = UpDgrad {
                d_pre: d_pre.view(),
                segments: &set.segments,
                weight: up.borrow(),
                input_weight: None,
                out: RowDest::direct(set.out.view_mut()),
            };
            cuda.up_dgrad(call)
        })?;
        Ok(down_ms + up_ms)
    }

    /// In bf16, overwritten; then added to f32 where the kernels can.
    fn weight_gradients(&mut self, up: &Tensor<Cuda>, down: &Tensor<Cuda>) -> Result<()> {
        let (cuda, flop) = (self.cuda, self.w.flop_down());
        for (dtype, accumulate, suffix) in [(DType::BF16, false, ""), (DType::F32, true, "-f32-add")] {
            let (mut d_up, mut d_down) =
                (Tensor::zeros(cuda, dtype, up.dims())?, Tensor::zeros(cuda, dtype, down.dims())?);
            let up = self.time(&format!("wgrad1{suffix}"), 2.0 * flop, |set, _| {
                let call = Wgrad {
                    left: RowSource::direct(set.pre.view()),
                    right: RowSource::mapped(set.x.view(), set.map.view()),
                    slot_weights: None,
                    segments: &set.segments,
                    out: d_up.view_mut(),
                    bias: None,
                    accumulate,
                    movement_sms: None,
                };
                cuda.wgrad(call)
            });
            let down = self.time(&format!("wgrad2{suffix}"), flop, |set, _| {
                let call = Wgrad {
                    left: RowSource::mapped(set.x.view(), set.map.view()),
                    right: RowSource::direct(set.hidden.view()),
                    slot_weights: None,
                    segments: &set.segments,
                    out: d_down.view_mut(),
                    bias: None,
                    accumulate,
                    movement_sms: None,
                };
                cuda.wgrad(call)
            });
            match up.and(down) {
                Err(e) if accumulate => complain(format_args!("{}: no gradients in f32: {e}", self.w.name)),
                done => done.map(drop)?,
            }
        }
        Ok(())
    }
}
