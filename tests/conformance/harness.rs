//! Ranks as threads, each with a group, and calls in plain vectors.

use std::thread;
use std::time::Duration;

use half::{bf16, f16};
use moebius::comm::{ThreadComm, ThreadWorld};
use moebius::cpu::Cpu;
use moebius::ep::{
    DispatchGrads, DispatchInputs, DispatchOutputs, DispatchSpec, DispatcherKind, Group, GroupConfig, Handle,
};
use moebius::{DType, Error, Result, Tensor, TensorRef};

/// One case of the suite.
#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    /// Fewest ranks that it makes sense for.
    pub min_ranks: usize,
    pub run: fn(&Setup),
}

/// Names a case after its function.
macro_rules! case {
    ($run:ident) => {
        case!($run, 1)
    };
    ($run:ident, $min_ranks:expr) => {
        $crate::harness::Case { name: stringify!($run), min_ranks: $min_ranks, run: $run }
    };
}
pub(crate) use case;

/// Long enough for a loaded machine, short enough to end a hang.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The dispatcher and the number of ranks under test.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub kind: DispatcherKind,
    pub ranks: usize,
    pub name: &'static str,
}

impl Setup {
    /// Runs `body` on every rank of a group; results in rank order. A panic of a rank is this function's.
    pub fn run<T: Send>(&self, config: GroupConfig, body: impl Fn(&mut Rank) -> T + Sync) -> Vec<T> {
        self.run_within(PATIENCE, config, body)
    }

    /// The same with another time limit for collectives.
    pub fn run_within<T: Send>(
        &self,
        timeout: Duration,
        config: GroupConfig,
        body: impl Fn(&mut Rank) -> T + Sync,
    ) -> Vec<T> {
        let body = |comm: ThreadComm| {
            let config = GroupConfig { dispatcher: self.kind, ..config.clone() };
            let group = Group::new(Cpu::poisoning(), (), Box::new(comm), config).expect("group");
            body(&mut Rank { rank: group.rank(), group })
        };
        let results = on_threads(self.ranks, timeout, body);
        let name = self.name;
        results.into_iter().map(|r| r.unwrap_or_else(|_| panic!("case {name}, {self:?}: a rank panicked"))).collect()
    }

    /// Experts for `per_rank` of each rank.
    pub fn experts(&self, per_rank: usize) -> usize {
        self.ranks * per_rank
    }

    /// Collectives of prepare, dispatch, combine, combine_bwd, dispatch_bwd.
    pub fn collectives(&self) -> [u64; 5] {
        match self.kind {
            DispatcherKind::Local => [0; 5],
            DispatcherKind::AllGather => [1, 1, 1, 1, 2],
            _ => [1; 5],
        }
    }
}

/// Runs `body` with each rank's communicator on a thread of its own.
pub fn on_threads<T: Send>(
    ranks: usize,
    timeout: Duration,
    body: impl Fn(ThreadComm) -> T + Sync,
) -> Vec<thread::Result<T>> {
    let body = &body;
    thread::scope(|scope| {
        let spawn = |comm| scope.spawn(move || body(comm));
        let threads: Vec<_> = ThreadWorld::create(ranks, timeout).into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join()).collect()
    })
}

/// A rank of the group under test.
pub struct Rank {
    pub rank: usize,
    pub group: Group<Cpu>,
}

/// Rows and weights in expert-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Slots {
    pub rows: Vec<f64>,
    pub weights: Vec<f64>,
}

/// Gradients of tokens and weights.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenGrads {
    pub tokens: Vec<f64>,
    pub weights: Vec<f64>,
}

/// A tensor of values that the dtype holds exactly (or rounds).
pub fn tensor(dtype: DType, values: &[f64], dims: &[usize]) -> Tensor<Cpu> {
    let made = match dtype {
        DType::F64 => Tensor::from_vec(values.to_vec(), dims),
        DType::F32 => Tensor::from_vec(values.iter().map(|v| *v as f32).collect(), dims),
        DType::F16 => Tensor::from_vec(values.iter().map(|v| f16::from_f64(*v)).collect(), dims),
        DType::BF16 => Tensor::from_vec(values.iter().map(|v| bf16::from_f64(*v)).collect(), dims),
        DType::I64 => Tensor::from_vec(values.iter().map(|v| *v as i64).collect(), dims),
        DType::I32 => Tensor::from_vec(values.iter().map(|v| *v as i32).collect(), dims),
        DType::U8 => Tensor::from_vec(values.iter().map(|v| *v as u8).collect(), dims),
        other => panic!("no tensors of {other} here"),
    };
    made.expect("tensor")
}

/// Sizes and dtype of the rows of a call.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    pub dtype: DType,
    pub hidden: usize,
}

pub const F32: fn(usize) -> Rows = |hidden| Rows { dtype: DType::F32, hidden };

/// What fills caller-supplied outputs before a call.
pub const CANARY: f64 = 77.0;

impl Rank {
    pub fn prepare(&mut self, ids: &[i64], spec: &DispatchSpec) -> Result<Handle<Cpu>> {
        let tokens = ids.len() / spec.top_k;
        let ids = Tensor::from_vec(ids.to_vec(), &[tokens, spec.top_k])?;
        self.group.dispatcher().prepare(ids.view(), None, spec)
    }

    pub fn prepare_weighted(&mut self, ids: &[i64], weights: &[f64], spec: &DispatchSpec) -> Result<Handle<Cpu>> {
        let dims = [ids.len() / spec.top_k, spec.top_k];
        let (ids, weights) = (Tensor::from_vec(ids.to_vec(), &dims)?, tensor(DType::F32, weights, &dims));
        self.group.dispatcher().prepare(ids.view(), Some(weights.view()), spec)
    }

    /// Dispatch into outputs full of [`CANARY`].
    pub fn dispatch(
        &mut self,
        handle: &Handle<Cpu>,
        rows: Rows,
        tokens: &[f64],
        weights: Option<&[f64]>,
    ) -> Result<Slots> {
        let n = handle.rows();
        let acc = rows.dtype.accumulator();
        let tokens = tensor(rows.dtype, tokens, &[handle.tokens(), rows.hidden]);
        let weights = weights.map(|w| tensor(acc, w, &[handle.tokens(), handle.spec().top_k]));
        let mut recv = tensor(rows.dtype, &vec![CANARY; n * rows.hidden], &[n, rows.hidden]);
        let mut recv_weights = tensor(acc, &vec![CANARY; n], &[n]);
        let outputs = DispatchOutputs {
            tokens: recv.view_mut(),
            weights: weights.as_ref().map(|_| recv_weights.view_mut()),
            scales: None,
        };
        let inputs = inputs(&tokens, &weights);
        self.group.dispatcher().dispatch(handle, inputs, outputs)?;
        Ok(Slots { rows: recv.to_f64(), weights: recv_weights.to_f64() })
    }

    /// Dispatch that leaves the rows where they arrived, brought into slot order here; padding becomes zero.
    pub fn dispatch_rows(
        &mut self,
        handle: &Handle<Cpu>,
        rows: Rows,
        tokens: &[f64],
        weights: Option<&[f64]>,
    ) -> Result<Slots> {
        let acc = rows.dtype.accumulator();
        let tokens = tensor(rows.dtype, tokens, &[handle.tokens(), rows.hidden]);
        let weights = weights.map(|w| tensor(acc, w, &[handle.tokens(), handle.spec().top_k]));
        let received = self.group.dispatcher().dispatch_rows(handle, inputs(&tokens, &weights))?;
        let weights = received.weights.as_ref().map(Tensor::to_f64).unwrap_or_default();
        Ok(Slots { rows: gathered(received.source(tokens.view(), handle).base, handle), weights })
    }

    pub fn combine(&mut self, handle: &Handle<Cpu>, rows: Rows, expert_out: &[f64]) -> Result<Vec<f64>> {
        let expert_out = tensor(rows.dtype, expert_out, &[handle.rows(), rows.hidden]);
        let mut out = Tensor::empty(self.group.device(), rows.dtype, &[handle.tokens(), rows.hidden])?;
        self.group.dispatcher().combine(handle, expert_out.view(), out.view_mut())?;
        Ok(out.to_f64())
    }

    /// Into an output full of [`CANARY`].
    pub fn combine_bwd(&mut self, handle: &Handle<Cpu>, rows: Rows, grad: &[f64]) -> Result<Vec<f64>> {
        let grad = tensor(rows.dtype, grad, &[handle.tokens(), rows.hidden]);
        let n = handle.rows();
        let mut out = tensor(rows.dtype, &vec![CANARY; n * rows.hidden], &[n, rows.hidden]);
        self.group.dispatcher().combine_bwd(handle, grad.view(), out.view_mut())?;
        Ok(out.to_f64())
    }

    /// In slot order; padding becomes zero.
    pub fn combine_bwd_rows(&mut self, handle: &Handle<Cpu>, rows: Rows, grad: &[f64]) -> Result<Vec<f64>> {
        let grad = tensor(rows.dtype, grad, &[handle.tokens(), rows.hidden]);
        let received = self.group.dispatcher().combine_bwd_rows(handle, grad.view())?;
        Ok(gathered(received.source(grad.view(), handle).base, handle))
    }

    pub fn dispatch_bwd(
        &mut self,
        handle: &Handle<Cpu>,
        rows: Rows,
        grad: &[f64],
        grad_weights: Option<&[f64]>,
    ) -> Result<TokenGrads> {
        let (n, t, acc) = (handle.rows(), handle.tokens(), rows.dtype.accumulator());
        let grad = tensor(rows.dtype, grad, &[n, rows.hidden]);
        let grad_weights = grad_weights.map(|w| tensor(acc, w, &[n]));
        let mut d_tokens = Tensor::empty(self.group.device(), rows.dtype, &[t, rows.hidden])?;
        let mut d_weights = Tensor::empty(self.group.device(), acc, &[t, handle.spec().top_k])?;
        let grads = DispatchGrads {
            rows: grad.view(),
            weights: grad_weights.as_ref().map(Tensor::view),
            d_tokens: d_tokens.view_mut(),
            d_weights: Some(d_weights.view_mut()),
        };
        self.group.dispatcher().dispatch_bwd(handle, grads)?;
        Ok(TokenGrads { tokens: d_tokens.to_f64(), weights: d_weights.to_f64() })
    }

    pub fn calls(&mut self) -> u64 {
        self.group.dispatcher().communicator().calls()
    }

    /// A whole step that must succeed: says that the group works.
    pub fn works(&mut self) {
        let experts = self.group.config().num_experts;
        let spec = DispatchSpec { backward: true, ..DispatchSpec::new(99, 1) };
        let ids = [(self.rank % experts) as i64, (experts - 1) as i64];
        let handle = self.prepare(&ids, &spec).expect("prepare after a fault");
        let x = [self.rank as f64, 1.0, -1.0, 0.5];
        let slots = self.dispatch(&handle, F32(2), &x, None).expect("dispatch after a fault");
        let out = self.combine(&handle, F32(2), &slots.rows).expect("combine after a fault");
        assert_eq!(out, x, "identity after a fault");
    }
}

fn inputs<'a>(tokens: &'a Tensor<Cpu>, weights: &'a Option<Tensor<Cpu>>) -> DispatchInputs<'a, Cpu> {
    DispatchInputs { tokens: tokens.view(), weights: weights.as_ref().map(Tensor::view), scales: None }
}

/// Rows behind a handle's map.
fn gathered(base: TensorRef<'_, Cpu>, handle: &Handle<Cpu>) -> Vec<f64> {
    let map = handle.row_map();
    let width = base.row_bytes() / base.dtype().size();
    let all = values(base);
    let row = |from: &i32| match usize::try_from(*from) {
        Ok(r) => all[r * width..(r + 1) * width].to_vec(),
        Err(_) => vec![0.0; width],
    };
    map.as_slice::<i32>().expect("map").iter().flat_map(row).collect()
}

/// A view's elements.
pub fn values(t: TensorRef<'_, Cpu>) -> Vec<f64> {
    let bytes = t.data();
    match t.dtype() {
        DType::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_ne_bytes(*b)).collect(),
        DType::F32 => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_ne_bytes(*b))).collect(),
        DType::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_ne_bytes(*b).to_f64()).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_ne_bytes(*b).to_f64()).collect(),
        DType::I32 => bytes.as_chunks().0.iter().map(|b| f64::from(i32::from_ne_bytes(*b))).collect(),
        other => panic!("no values of {other} here"),
    }
}

/// Filled slots of each local expert: `(first, count)`.
pub fn zones(handle: &Handle<Cpu>) -> Vec<(usize, usize)> {
    let zones = handle.zones();
    let offsets = zones.offsets.as_slice::<i64>().expect("offsets");
    let counts = zones.counts.as_slice::<i64>().expect("counts");
    offsets.iter().zip(counts).map(|(o, c)| (*o as usize, *c as usize)).collect()
}

/// Slots that hold a choice.
pub fn filled(handle: &Handle<Cpu>) -> Vec<usize> {
    zones(handle).into_iter().flat_map(|(first, count)| first..first + count).collect()
}

/// Replaces every row that is no filled slot by NaN.
pub fn poison_padding(handle: &Handle<Cpu>, width: usize, rows: &mut [f64]) {
    let filled = filled(handle);
    for (slot, row) in rows.chunks_mut(width.max(1)).enumerate() {
        if !filled.contains(&slot) {
            row.fill(f64::NAN);
        }
    }
}

/// The kept ids of this rank.
pub fn kept(handle: &Handle<Cpu>) -> Vec<i64> {
    handle.kept_ids().as_slice::<i32>().expect("kept ids").iter().map(|v| i64::from(*v)).collect()
}

/// Token t of rank r at column c: distinct, exact in f32.
pub fn x(rank: usize, tokens: usize, hidden: usize) -> Vec<f64> {
    (0..tokens * hidden).map(|i| (rank * 1024 + i) as f64 / 8.0 - 40.0).collect()
}

/// The routing of TransformerEngine's tests: `((rank·T + t)·K + k) mod E`.
pub fn round_robin(rank: usize, tokens: usize, k: usize, experts: usize) -> Vec<i64> {
    (0..tokens * k).map(|i| ((rank * tokens * k + i) % experts) as i64).collect()
}

/// A spec with backward.
pub fn training(layer: u32, k: usize) -> DispatchSpec {
    DispatchSpec { backward: true, ..DispatchSpec::new(layer, k) }
}

/// Says that a rank heard of another's failure.
pub fn assert_peer<T: std::fmt::Debug>(result: Result<T>, failing: usize, reason: &str) {
    match result {
        Err(Error::Peer { peer, reason: found, .. }) => {
            assert_eq!(peer, failing);
            assert!(found.contains(reason), "{found:?} does not name {reason:?}");
        }
        other => panic!("expected the failure of rank {failing}, found {other:?}"),
    }
}
