//! The library's flat layout, which this crate does not use, as a C program makes its group, its handle and its calls:
//! a row arrives once for each rank that it goes to, with its choices there beside it. Rows lie in ordinary memory, as
//! those of the bench's other handle do.

use moebius::comm::Communicator;
use moebius::cuda::Cuda;
use moebius::nccl::NcclComm;
use moebius::nccl_ep::{NcclEpLibrary, result, sys};
use moebius::{DType, Result, Tensor};

use crate::bench::{Phase, Run, Step, free};
use crate::raw::Endpoint;

/// A flat group, its one handle, and what its calls write.
pub struct Flat<'a> {
    library: NcclEpLibrary,
    pub comm: &'a NcclComm,
    group: sys::ncclEpGroup_t,
    handle: sys::ncclEpHandle_t,
    /// Bytes of the GPU's memory that group and handle took.
    pub held: usize,
    pub counts: Tensor<Cuda>,
    pub total: Tensor<Cuda>,
    pub rows: Tensor<Cuda>,
    pub rows_w: Tensor<Cuda>,
    pub rows_ids: Tensor<Cuda>,
    pub y: Tensor<Cuda>,
    pub d_w: Tensor<Cuda>,
}

/// A struct of the library's as its header initializes it.
fn blank<T>() -> T {
    // SAFETY: used for structs of the interface only: integers and pointers, for which the interface asks for zeros.
    let mut value: T = unsafe { std::mem::zeroed() };
    // SAFETY: size and magic are the first two u32 of each.
    unsafe { (&raw mut value).cast::<[u32; 2]>().write([size_of::<T>() as u32, sys::NCCL_EP_MAGIC]) };
    value
}

/// A tensor as the library is told of it. It must not move while the library looks at it.
struct Described([usize; 2], sys::ncclEpTensor_t);

impl Described {
    fn of(t: &Tensor<Cuda>) -> Self {
        let mut raw: sys::ncclEpTensor_t = blank();
        raw.magic = sys::NCCL_EP_TENSOR_MAGIC;
        raw.ndim = t.dims().len() as u32;
        raw.datatype = match t.dtype() {
            DType::I32 => sys::ncclDataType_t::ncclInt32,
            DType::I64 => sys::ncclDataType_t::ncclInt64,
            DType::F32 => sys::ncclDataType_t::ncclFloat32,
            _ => sys::ncclDataType_t::ncclBfloat16,
        };
        raw.data = t.view().data().address() as *mut _;
        Self([t.dims()[0], t.dims().get(1).copied().unwrap_or(1)], raw)
    }

    fn pointer(&mut self) -> *mut sys::ncclEpTensor_t {
        self.1.sizes = self.0.as_mut_ptr();
        &raw mut self.1
    }
}

impl<'a> Flat<'a> {
    /// Joins a group (collective) and routes the step: `all` has every rank's choices.
    pub fn new(endpoint: &'a Endpoint<'_>, run: &Run, step: &Step, all: &[Vec<i64>]) -> Result<Self> {
        let (cuda, comm, shape) = (endpoint.cuda(), &endpoint.comm, run.shape);
        let (ranks, k, local) = (comm.size(), shape.k, shape.experts / comm.size());
        let mut config: sys::ncclEpGroupConfig_t = blank();
        config.version = sys::NCCL_EP_API_VERSION;
        config.algorithm = sys::ncclEpAlgorithm_t::NCCL_EP_ALGO_HIGH_THROUGHPUT;
        config.num_experts = shape.experts as u32;
        config.max_dispatch_tokens_per_rank = run.tokens as u32;
        // A token comes to a rank once at most, so this is all that can come. Choices are counted for the expert-major
        // layout alone: `num_topk` stays unset.
        config.max_recv_tokens_per_rank = if run.fixed { (ranks * run.tokens) as u32 } else { sys::NCCL_EP_AUTO };
        config.max_token_bytes = (2 * shape.hidden) as u32;
        let library = endpoint.library.clone();
        let before = free(cuda)?;
        let (group, handle) = comm.with_raw(|parts| {
            // The header would have -1 choices here, which the library refuses.
            let layout = sys::ncclEpLayout_t::NCCL_EP_LAYOUT_FLAT;
            let sizes = result::RawHandleSizes { layout, config: &blank(), top_k: k as i32 };
            // SAFETY: the communicator lives and its GPU is bound while this runs; group and handle go before it does;
            // the other layout's group was made with the same sizes, which this crate checked.
            unsafe {
                let group = result::create_group(library.functions(), parts.comm.cast(), &config)?;
                Ok((group, result::init_handle(library.functions(), group, sizes, std::ptr::null())?))
            }
        })?;
        let held = before.saturating_sub(free(cuda)?);
        let of = |dtype, dims: &[usize]| Tensor::<Cuda>::zeros(cuda, dtype, dims);
        let mut flat = Self {
            library,
            comm,
            group,
            handle,
            held,
            counts: of(DType::I32, &[local])?,
            total: of(DType::I32, &[1])?,
            rows: of(DType::BF16, &[0, shape.hidden])?,
            rows_w: of(DType::F32, &[0, k])?,
            rows_ids: of(DType::I64, &[0, k])?,
            y: of(DType::BF16, &[run.tokens, shape.hidden])?,
            d_w: of(DType::F32, &[run.tokens, k])?,
        };
        flat.call(Phase::Prepare, step)?;
        let mut counts = vec![0.0; local];
        let own = all.iter().flatten().map(|id| *id as usize).filter(|id| id / local == comm.rank());
        own.for_each(|id| counts[id % local] += 1.0);
        let total = flat.arrivals(all, (k, local)).len();
        assert_eq!((endpoint.get(&flat.counts)?, endpoint.get(&flat.total)?), (counts, vec![total as f64]));
        let n = if run.fixed { ranks * run.tokens } else { total };
        flat.rows = of(DType::BF16, &[n, shape.hidden])?;
        (flat.rows_w, flat.rows_ids) = (of(DType::F32, &[n, k])?, of(DType::I64, &[n, k])?);
        Ok(flat)
    }

    /// The tokens that come to this rank: source and place there.
    pub fn arrivals(&self, all: &[Vec<i64>], (k, local): (usize, usize)) -> Vec<(usize, usize)> {
        let here = |token: &[i64]| token.iter().any(|id| *id as usize / local == self.comm.rank());
        let of = |(source, ids): (usize, &'_ Vec<i64>)| {
            let tokens = ids.chunks(k).enumerate().filter(|(_, token)| here(token));
            tokens.map(|(t, _)| (source, t)).collect::<Vec<_>>()
        };
        all.iter().enumerate().flat_map(of).collect()
    }

    /// One call, on the communicator's GPU and stream.
    pub fn call(&mut self, phase: Phase, step: &Step) -> Result<()> {
        let (library, handle) = (self.library.functions(), self.handle);
        let stream: sys::cudaStream_t = self.comm.cuda().stream().cu_stream().cast();
        let backward = matches!(phase, Phase::CombineBwd | Phase::DispatchBwd);
        let direction =
            if backward { sys::ncclEpPassDir_t::NCCL_EP_BWD_PASS } else { sys::ncclEpPassDir_t::NCCL_EP_FWD_PASS };
        let [mut ids, mut x, mut w] = [&step.ids, &step.x, &step.w].map(Described::of);
        let [mut counts, mut total] = [&self.counts, &self.total].map(Described::of);
        let [mut rows, mut rows_w, mut rows_ids] = [&self.rows, &self.rows_w, &self.rows_ids].map(Described::of);
        let [mut y, mut d_w] = [&self.y, &self.d_w].map(Described::of);
        match phase {
            Phase::Prepare => {
                // Offsets are the expert-major layout's alone.
                let mut info: sys::ncclEpLayoutInfo_t = blank();
                (info.expert_counters, info.recv_total_counter) = (counts.pointer(), total.pointer());
                // SAFETY: the handle lives; tensors have the sizes that the library documents for this layout, and
                // their memory is given back in the order of the stream.
                unsafe { result::update_handle(library, handle, ids.pointer(), &info, stream)? };
            }
            Phase::Dispatch | Phase::CombineBwd => {
                let info = std::ptr::null();
                let mut call = result::Dispatch { inputs: blank(), outputs: blank(), info, config: blank() };
                (call.inputs.tokens, call.outputs.tokens) = (x.pointer(), rows.pointer());
                if !backward {
                    call.inputs.topk_weights = w.pointer();
                    (call.outputs.topk_weights, call.outputs.topk_idx) = (rows_w.pointer(), rows_ids.pointer());
                }
                call.config.pass_direction = direction;
                // SAFETY: as above; the handle was updated by `new`.
                unsafe { result::dispatch(library, handle, &call, stream)? };
            }
            Phase::Combine | Phase::DispatchBwd => {
                let mut call = result::Combine { inputs: blank(), outputs: blank(), config: blank() };
                (call.inputs.tokens, call.outputs.tokens) = (rows.pointer(), y.pointer());
                if backward {
                    (call.inputs.topk_weights, call.outputs.topk_weights) = (rows_w.pointer(), d_w.pointer());
                }
                call.config.pass_direction = direction;
                // SAFETY: as above.
                unsafe { result::combine(library, handle, &call, stream)? };
            }
        }
        Ok(())
    }
}

impl Drop for Flat<'_> {
    fn drop(&mut self) {
        // Nothing can be reported from here. What a communicator that is gone leaves stays until the process ends.
        let _ = self.comm.with_raw(|_| {
            // SAFETY: both live and are not used again; the handle goes before its group.
            unsafe {
                result::handle_destroy(self.library.functions(), self.handle)?;
                result::group_destroy(self.library.functions(), self.group)?;
            }
            Ok(())
        });
    }
}
