//! Ranks as threads, each with a group, and calls in plain vectors.

use std::thread;
use std::time::Duration;

use moebius::ep::{
    DispatchGrads, DispatchInputs, DispatchOutputs, DispatchSpec, DispatcherKind, Group, GroupConfig, Handle, Reporting,
};
use moebius::{DType, Error, Result, Tensor, TensorRef};

pub use super::devices::{Endpoint, Target};
use super::forward_alone::end_together;

/// One case of the suite.
#[derive(Clone)]
pub struct Case<D: Target> {
    pub name: &'static str,
    /// Fewest ranks that it makes sense for.
    pub min_ranks: usize,
    /// Dispatchers that it is about; `None`: all.
    pub kinds: Option<&'static [DispatcherKind]>,
    pub run: fn(&Setup<D>),
}

impl<D: Target> Case<D> {
    /// Whether it is for so many ranks over this dispatcher.
    pub fn is_for(&self, kind: DispatcherKind, ranks: usize) -> bool {
        self.min_ranks <= ranks && self.kinds.is_none_or(|kinds| kinds.contains(&kind))
    }
}

/// Names a case after its function.
macro_rules! case {
    ($run:ident) => {
        case!($run, 1)
    };
    ($run:ident, $min_ranks:expr) => {
        Case { name: stringify!($run), min_ranks: $min_ranks, kinds: None, run: $run }
    };
    ($run:ident, $min_ranks:expr, $kinds:expr) => {
        Case { name: stringify!($run), min_ranks: $min_ranks, kinds: Some($kinds), run: $run }
    };
}
pub(crate) use case;

/// Long enough for a loaded machine, short enough to end a hang.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// The device, the dispatcher and the number of ranks under test.
#[derive(Debug, Clone)]
pub struct Setup<D: Target> {
    pub device: D,
    pub kind: DispatcherKind,
    pub ranks: usize,
    pub name: &'static str,
    /// Specs that would report at once report later, and are asked right after prepare.
    pub later: bool,
    /// No rank asks for backward.
    pub forward_only: bool,
    /// Ranks of each imitated host, for dispatchers between hosts; 0: as they say.
    pub ranks_per_host: usize,
}

impl<D: Target> Setup<D> {
    /// Runs `body` on every rank of a group; results in rank order. A panic of a rank is this function's.
    pub fn run<T: Send>(&self, config: GroupConfig, body: impl Fn(&mut Rank<D>) -> T + Sync) -> Vec<T> {
        let body = |endpoint: Endpoint<D>| {
            let config = GroupConfig { dispatcher: self.kind, ..config.clone() };
            body(&mut self.rank(endpoint, config).expect("group"))
        };
        let results = self.on_threads(TIMEOUT, body);
        let name = self.name;
        results.into_iter().map(|r| r.unwrap_or_else(|_| panic!("case {name}, {self:?}: a rank panicked"))).collect()
    }

    /// Runs `body` with each rank's endpoint on a thread of its own.
    pub fn on_threads<T: Send>(
        &self,
        timeout: Duration,
        body: impl Fn(Endpoint<D>) -> T + Sync,
    ) -> Vec<thread::Result<T>> {
        on_threads(self.device.endpoints(self.ranks, timeout), body)
    }

    /// Joins a group.
    pub fn rank(&self, endpoint: Endpoint<D>, config: GroupConfig) -> Result<Rank<D>> {
        let group = endpoint.join(GroupConfig { ranks_per_host: self.ranks_per_host, ..config })?;
        let columns = match self.kind {
            DispatcherKind::NcclEp => 8,
            DispatcherKind::NcclEpLowLatency => 512,
            _ => 1,
        };
        let (forward_only, later) = (self.forward_only, self.later);
        Ok(Rank { rank: group.rank(), group, columns, forward_only, later })
    }

    /// Whether the library's rules and habits apply.
    pub fn is_nccl_ep(&self) -> bool {
        matches!(self.kind, DispatcherKind::NcclEp | DispatcherKind::NcclEpLowLatency)
    }

    /// Experts for `per_rank` of each rank.
    pub fn experts(&self, per_rank: usize) -> usize {
        self.ranks * per_rank
    }

    /// Collectives of joining a group.
    pub fn joining(&self) -> u64 {
        match self.kind {
            // What each rank thinks of the library.
            DispatcherKind::NcclEp | DispatcherKind::NcclEpLowLatency => 2,
            // Which GPUs they are, the same of these, memory that all reach (what is left, and a meeting), and what each
            // thinks of that.
            DispatcherKind::NvLink | DispatcherKind::NvLinkLowLatency => 6,
            // Which hosts they are on.
            DispatcherKind::Hierarchical => 2,
            _ => 1,
        }
    }

    /// Collectives of prepare, dispatch, combine, combine_bwd, dispatch_bwd.
    pub fn collectives(&self) -> [u64; 5] {
        match self.kind {
            DispatcherKind::Local => [0; 5],
            DispatcherKind::AllGather => [1, 1, 1, 1, 2],
            // Counterparts tell each other their choices; then two hops.
            DispatcherKind::Hierarchical => [2; 5],
            // The first dispatch also meets before it compares the rows' size, makes the library's group, and tells it
            // the routing.
            DispatcherKind::NcclEp | DispatcherKind::NcclEpLowLatency => [1, 5, 1, 1, 1],
            // The first dispatch makes memory that all reach.
            DispatcherKind::NvLink => [1, 4, 1, 1, 1],
            // And it meets once more, when all have cleared theirs.
            DispatcherKind::NvLinkLowLatency => [1, 5, 1, 1, 1],
            _ => [1; 5],
        }
    }
}

/// Runs `body` with each endpoint on a thread of its own.
pub fn on_threads<D: Target, T: Send>(
    endpoints: Vec<Endpoint<D>>,
    body: impl Fn(Endpoint<D>) -> T + Sync,
) -> Vec<thread::Result<T>> {
    let body = &body;
    end_together(thread::scope(|scope| {
        let spawn = |endpoint| scope.spawn(move || body(endpoint));
        let threads: Vec<_> = endpoints.into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join()).collect()
    }))
}

/// A rank of the group under test.
pub struct Rank<D: Target> {
    pub rank: usize,
    pub group: Group<D>,
    /// Rows are widened to a multiple of this, with zeros that no case sees.
    pub columns: usize,
    /// As [`Setup::forward_only`]: cases that come to backward end there.
    pub forward_only: bool,
    /// As [`Setup::later`].
    pub later: bool,
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

/// Sizes and dtype of the rows of a call.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    pub dtype: DType,
    pub hidden: usize,
}

pub const F32: fn(usize) -> Rows = |hidden| Rows { dtype: DType::F32, hidden };

/// Value that fills caller-supplied outputs before a call.
pub const CANARY: f64 = 77.0;

impl<D: Target> Rank<D> {
    /// A tensor of values that the dtype holds exactly (or rounds).
    pub fn put(&self, dtype: DType, values: &[f64], dims: &[usize]) -> Tensor<D> {
        self.group.device().put(dtype, values, dims)
    }

    pub fn values(&self, t: TensorRef<'_, D>) -> Vec<f64> {
        self.group.device().values(t)
    }

    /// Rows as they travel.
    fn put_rows(&self, rows: Rows, values: &[f64], count: usize) -> Tensor<D> {
        let wide = self.width(rows);
        if values.len() != count * rows.hidden || wide == rows.hidden {
            return self.put(rows.dtype, values, &[count, rows.hidden]);
        }
        let mut all = vec![0.0; count * wide];
        for (to, from) in all.chunks_mut(wide).zip(values.chunks(rows.hidden)) {
            to[..rows.hidden].copy_from_slice(from);
        }
        self.put(rows.dtype, &all, &[count, wide])
    }

    fn width(&self, rows: Rows) -> usize {
        rows.hidden.next_multiple_of(self.columns)
    }

    /// Rows as the cases see them.
    fn narrow(&self, rows: Rows, wide: Vec<f64>) -> Vec<f64> {
        match rows.hidden == self.width(rows) {
            true => wide,
            false => wide.chunks(self.width(rows)).flat_map(|row| row[..rows.hidden].to_vec()).collect(),
        }
    }

    /// Expert ids as the caller gives them.
    pub fn ids(&self, ids: &[i64], k: usize) -> Result<Tensor<D>> {
        Ok(self.group.device().host(&Tensor::from_vec(ids.to_vec(), &[ids.len().checked_div(k).unwrap_or(0), k])?))
    }

    pub fn prepare(&mut self, ids: &[i64], spec: &DispatchSpec) -> Result<Handle<D>> {
        let ids = self.ids(ids, spec.top_k)?;
        self.prepare_with(&ids, None, spec)
    }

    pub fn prepare_weighted(&mut self, ids: &[i64], weights: &[f64], spec: &DispatchSpec) -> Result<Handle<D>> {
        let dims = [ids.len() / spec.top_k, spec.top_k];
        let (ids, weights) = (self.ids(ids, spec.top_k)?, self.put(DType::F32, weights, &dims));
        self.prepare_with(&ids, Some(&weights), spec)
    }

    pub fn prepare_with(
        &mut self,
        ids: &Tensor<D>,
        weights: Option<&Tensor<D>>,
        spec: &DispatchSpec,
    ) -> Result<Handle<D>> {
        let (ids, weights) = (ids.view(), weights.map(Tensor::view));
        let spec = DispatchSpec { backward: spec.backward && !self.forward_only, ..*spec };
        if !self.later || spec.reporting == Reporting::Deferred {
            return self.group.dispatcher().prepare(ids, weights, &spec);
        }
        let spec = DispatchSpec { reporting: Reporting::Deferred, ..spec };
        let handle = self.group.dispatcher().prepare(ids, weights, &spec)?;
        self.group.dispatcher().check()?;
        Ok(handle)
    }

    /// Dispatch into outputs full of [`CANARY`].
    pub fn dispatch(
        &mut self,
        handle: &Handle<D>,
        rows: Rows,
        tokens: &[f64],
        weights: Option<&[f64]>,
    ) -> Result<Slots> {
        let n = handle.rows();
        let acc = rows.dtype.accumulator();
        let tokens = self.put_rows(rows, tokens, handle.tokens());
        let weights = weights.map(|w| self.put(acc, w, &[handle.tokens(), handle.spec().top_k]));
        let mut recv = self.put(rows.dtype, &vec![CANARY; n * self.width(rows)], &[n, self.width(rows)]);
        let mut recv_weights = self.put(acc, &vec![CANARY; n], &[n]);
        let outputs = DispatchOutputs {
            tokens: recv.view_mut(),
            weights: weights.as_ref().map(|_| recv_weights.view_mut()),
            scales: None,
        };
        let inputs = inputs(&tokens, &weights);
        self.group.dispatcher().dispatch(handle, inputs, outputs)?;
        let rows = self.narrow(rows, self.values(recv.view()));
        Ok(Slots { rows, weights: self.values(recv_weights.view()) })
    }

    /// Dispatch that leaves the rows where they arrived, brought into slot order here; padding becomes zero.
    pub fn dispatch_rows(
        &mut self,
        handle: &Handle<D>,
        rows: Rows,
        tokens: &[f64],
        weights: Option<&[f64]>,
    ) -> Result<Slots> {
        let acc = rows.dtype.accumulator();
        let tokens = self.put_rows(rows, tokens, handle.tokens());
        let weights = weights.map(|w| self.put(acc, w, &[handle.tokens(), handle.spec().top_k]));
        let received = self.group.dispatcher().dispatch_rows(handle, inputs(&tokens, &weights))?;
        let weights = received.weights.as_ref().map(|w| self.values(w.view())).unwrap_or_default();
        let all = self.gathered(received.source(tokens.view(), handle).base, received.map.as_ref(), handle);
        Ok(Slots { rows: self.narrow(rows, all), weights })
    }

    pub fn combine(&mut self, handle: &Handle<D>, rows: Rows, expert_out: &[f64]) -> Result<Vec<f64>> {
        let expert_out = self.put_rows(rows, expert_out, handle.rows());
        let mut out = Tensor::empty(self.group.device(), rows.dtype, &[handle.tokens(), self.width(rows)])?;
        self.group.dispatcher().combine(handle, expert_out.view(), out.view_mut())?;
        Ok(self.narrow(rows, self.values(out.view())))
    }

    /// Into an output full of [`CANARY`].
    pub fn combine_bwd(&mut self, handle: &Handle<D>, rows: Rows, grad: &[f64]) -> Result<Vec<f64>> {
        let grad = self.put_rows(rows, grad, handle.tokens());
        let n = handle.rows();
        let mut out = self.put(rows.dtype, &vec![CANARY; n * self.width(rows)], &[n, self.width(rows)]);
        let done = self.group.dispatcher().combine_bwd(handle, grad.view(), out.view_mut());
        self.unless_forward_alone(done)?;
        Ok(self.narrow(rows, self.values(out.view())))
    }

    /// In slot order; padding becomes zero.
    pub fn combine_bwd_rows(&mut self, handle: &Handle<D>, rows: Rows, grad: &[f64]) -> Result<Vec<f64>> {
        let grad = self.put_rows(rows, grad, handle.tokens());
        let received = self.group.dispatcher().combine_bwd_rows(handle, grad.view());
        let received = self.unless_forward_alone(received)?;
        Ok(self.narrow(rows, self.gathered(received.source(grad.view(), handle).base, None, handle)))
    }

    pub fn dispatch_bwd(
        &mut self,
        handle: &Handle<D>,
        rows: Rows,
        grad: &[f64],
        grad_weights: Option<&[f64]>,
    ) -> Result<TokenGrads> {
        let (n, t, acc) = (handle.rows(), handle.tokens(), rows.dtype.accumulator());
        let grad = self.put_rows(rows, grad, n);
        let grad_weights = grad_weights.map(|w| self.put(acc, w, &[n]));
        let mut d_tokens = Tensor::empty(self.group.device(), rows.dtype, &[t, self.width(rows)])?;
        let mut d_weights = Tensor::empty(self.group.device(), acc, &[t, handle.spec().top_k])?;
        let grads = DispatchGrads {
            rows: grad.view(),
            weights: grad_weights.as_ref().map(Tensor::view),
            d_tokens: d_tokens.view_mut(),
            d_weights: Some(d_weights.view_mut()),
        };
        let done = self.group.dispatcher().dispatch_bwd(handle, grads);
        self.unless_forward_alone(done)?;
        let tokens = self.narrow(rows, self.values(d_tokens.view()));
        Ok(TokenGrads { tokens, weights: self.values(d_weights.view()) })
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

    /// Rows behind a handle's map.
    fn gathered(&self, base: TensorRef<'_, D>, map: Option<&Tensor<D>>, handle: &Handle<D>) -> Vec<f64> {
        let width = base.row_bytes() / base.dtype().size();
        let all = self.values(base);
        let row = |from: f64| match from >= 0.0 {
            true => all[from as usize * width..(from as usize + 1) * width].to_vec(),
            false => vec![0.0; width],
        };
        self.values(map.map_or(handle.row_map(), Tensor::view)).into_iter().flat_map(row).collect()
    }

    /// Filled slots of each local expert: `(first, count)`.
    pub fn segments(&self, handle: &Handle<D>) -> Vec<(usize, usize)> {
        let segments = handle.segments();
        let (offsets, counts) = (self.values(segments.offsets.view()), self.values(segments.counts.view()));
        offsets.iter().zip(counts).map(|(o, c)| (*o as usize, c as usize)).collect()
    }

    /// Slots that hold a choice.
    pub fn filled(&self, handle: &Handle<D>) -> Vec<usize> {
        self.segments(handle).into_iter().flat_map(|(first, count)| first..first + count).collect()
    }

    /// Replaces every row that is no filled slot by NaN.
    pub fn poison_padding(&self, handle: &Handle<D>, width: usize, rows: &mut [f64]) {
        let filled = self.filled(handle);
        for (slot, row) in rows.chunks_mut(width.max(1)).enumerate() {
            if !filled.contains(&slot) {
                row.fill(f64::NAN);
            }
        }
    }

    /// The kept ids of this rank.
    pub fn kept(&self, handle: &Handle<D>) -> Vec<i64> {
        self.values(handle.kept_ids()).into_iter().map(|v| v as i64).collect()
    }
}

fn inputs<'a, D: Target>(tokens: &'a Tensor<D>, weights: &'a Option<Tensor<D>>) -> DispatchInputs<'a, D> {
    DispatchInputs { tokens: tokens.view(), weights: weights.as_ref().map(Tensor::view), scales: None }
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
