//! The layer without its router, as peers count it: ids and weights are given, their gradients are made.

use moebius::config::{Activation, WeightAt};
use moebius::cuda::Cuda;
use moebius::ep::{DispatchGrads, DispatchInputs, DispatchSpec, Group, GroupConfig, Handle, Received, Reporting};
use moebius::kernels::*;
use moebius::{DType, Result, Tensor};

use crate::Workload;
use crate::data::Random;
use crate::layer::{Results, Set, Weights};
use crate::report::SETS;

/// Experts and weights of each token.
struct Routing {
    ids: Tensor<Cuda>,
    weights: Tensor<Cuda>,
}

pub struct Routed<'a> {
    cuda: &'a Cuda,
    w: &'a Workload,
    weights: &'a Weights,
    group: Group<Cuda>,
    routing: Vec<Routing>,
}

/// State of a forward that its backward needs.
struct Kept {
    handle: Handle<Cuda>,
    received: Received<Cuda>,
    pre: Option<Tensor<Cuda>>,
}

/// Weight of each slot.
fn scaled(received: &Received<Cuda>) -> Option<SlotWeights<'_, Cuda>> {
    received.weights.as_ref().map(|v| SlotWeights { values: v.view(), map: None, at: WeightAt::Activation })
}

impl<'a> Routed<'a> {
    pub fn new(cuda: &'a Cuda, w: &'a Workload, weights: &'a Weights, random: &mut Random) -> Result<Self> {
        let dims = [w.tokens, w.top_k];
        let routing = (0..SETS)
            .map(|_| {
                let ids = Tensor::from_vec(random.experts(w), &dims)?.to(cuda)?;
                let weights = Tensor::from_vec(vec![1.0 / w.top_k as f32; w.slots()], &dims)?.to(cuda)?;
                Ok(Routing { ids, weights })
            })
            .collect::<Result<_>>()?;
        Ok(Self { cuda, w, weights, group: cuda.group(GroupConfig::new(w.experts, w.tokens))?, routing })
    }

    pub fn forward(&mut self, set: &Set, number: usize, results: &mut Results) -> Result<()> {
        self.experts_of(set, number, results, false).map(drop)
    }

    fn slots(&self, width: usize) -> Result<Tensor<Cuda>> {
        Tensor::empty(self.cuda, DType::BF16, &[self.w.slots(), width])
    }

    fn experts_of(&mut self, set: &Set, number: usize, results: &mut Results, backward: bool) -> Result<Kept> {
        let (cuda, w) = (self.cuda, self.w);
        let Routing { ids, weights } = &self.routing[number];
        let spec = DispatchSpec { backward, reporting: Reporting::Deferred, ..DispatchSpec::new(0, w.top_k) };
        let handle = self.group.dispatcher().prepare(ids.view(), None, &spec)?;
        let inputs = DispatchInputs { tokens: set.x.view(), weights: Some(weights.view()), scales: None };
        let received = self.group.dispatcher().dispatch_rows(&handle, inputs)?;
        let mut pre = if backward { Some(self.slots(2 * w.inner)?) } else { None };
        let mut hidden = self.slots(w.inner)?;
        let up = Up {
            rows: received.source(set.x.view(), &handle),
            segments: handle.segments(),
            weight: self.weights.up.view().into(),
            bias: None,
            slot_weights: scaled(&received),
            activation: Activation::SiluGlu,
            pre: pre.as_mut().map(Tensor::view_mut),
            out: RowDest::direct(hidden.view_mut()),
            movement_sms: None,
        };
        cuda.up(up)?;
        let mut out = self.slots(w.hidden)?;
        let down = Down {
            rows: RowSource::direct(hidden.view()),
            segments: handle.segments(),
            weight: self.weights.down.view().into(),
            bias: None,
            slot_weights: scaled(&received),
            out: RowDest::direct(out.view_mut()),
        };
        cuda.down(down)?;
        self.group.dispatcher().combine(&handle, out.view(), results.y.view_mut())?;
        Ok(Kept { handle, received, pre })
    }

    /// Forward and backward.
    pub fn step(&mut self, set: &Set, number: usize, results: &mut Results) -> Result<()> {
        let Kept { handle, received, pre } = self.experts_of(set, number, results, true)?;
        let Some(pre) = pre else { return Ok(()) };
        let (cuda, w) = (self.cuda, self.w);
        let d_out = self.group.dispatcher().combine_bwd_rows(&handle, set.d_y.view())?;
        let (mut d_pre, mut hidden) = (self.slots(2 * w.inner)?, self.slots(w.inner)?);
        let mut d_slot_weights = Tensor::empty(cuda, DType::F32, &[w.slots()])?;
        let down = DownBwd {
            grad: d_out.source(set.d_y.view(), &handle),
            segments: handle.segments(),
            weight: self.weights.down.view().into(),
            bias: None,
            pre: pre.view(),
            slot_weights: scaled(&received),
            activation: Activation::SiluGlu,
            d_pre: d_pre.view_mut(),
            hidden: Some(hidden.view_mut()),
            d_slot_weights: Some(d_slot_weights.view_mut()),
        };
        cuda.down_bwd(down)?;
        let mut d_rows = self.slots(w.hidden)?;
        let up = UpDgrad {
            d_pre: d_pre.view(),
            segments: handle.segments(),
            weight: self.weights.up.view().into(),
            input_weight: None,
            out: RowDest::direct(d_rows.view_mut()),
        };
        cuda.up_dgrad(up)?;
        for (left, right, out) in [
            (d_out.source(set.d_y.view(), &handle), RowSource::direct(hidden.view()), &mut results.d_down),
            (RowSource::direct(d_pre.view()), received.source(set.x.view(), &handle), &mut results.d_up),
        ] {
            let call = Wgrad {
                left,
                right,
                slot_weights: None,
                segments: handle.segments(),
                out: out.view_mut(),
                bias: None,
                accumulate: false,
                movement_sms: None,
            };
            cuda.wgrad(call)?;
        }
        let mut d_weights = Tensor::empty(cuda, DType::F32, &[w.tokens, w.top_k])?;
        let grads = DispatchGrads {
            rows: d_rows.view(),
            weights: Some(d_slot_weights.view()),
            d_tokens: results.d_x.view_mut(),
            d_weights: Some(d_weights.view_mut()),
        };
        self.group.dispatcher().dispatch_bwd(&handle, grads)
    }
}
