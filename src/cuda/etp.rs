//! Sharded weights on a GPU.

use std::sync::Arc;

use crate::device::CaptureHook;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::{ShardDevice, Shares};
use crate::tensor::{Shape, Tensor, TensorMut};

use super::device::{Cuda, Event};
use super::heuristics::ADD_SHARES_BLOCKS;
use super::launch::Grid;
use super::params::{self, PERMUTE_THREADS, type_code};

/// Most parts whose sums the kernel can hold (`Pairs` in `kernels/permute.cu`).
const MOST_PARTS: usize = (1 << params::ADD_SHARES_LEVELS) - 1;
/// Elements that a thread of sums takes at a time.
const LANES: usize = params::ADD_SHARES_ELEMENTS as usize;

impl ShardDevice for Cuda {
    const ENQUEUES: bool = true;

    fn add_shares(&self, shares: Shares<'_, Self>, main: TensorMut<'_, Self>) -> Result<()> {
        const CALL: &str = "add_shares";
        let dtype = shares.own.dtype();
        type_code(CALL, "shares", dtype)?;
        let (parts, count) = (shares.parts(&main)?, main.count());
        if parts > MOST_PARTS {
            return Err(Error::invalid(CALL, "shares", format!("{MOST_PARTS} at most"), parts));
        }
        let (own, others, to) = (shares.own.data().ptr, shares.others.data().ptr, main.into_data().ptr);
        let word = (LANES * dtype.size()) as u64;
        let wide = (own | others).is_multiple_of(word) && to.is_multiple_of(16) && count.is_multiple_of(LANES);
        let p = params::AddSharesParams {
            own,
            others,
            main: to,
            count: count as i64,
            parts: parts as i64,
            rank: shares.rank as i64,
            wide: i64::from(wide),
            first: i64::from(shares.first),
            scale: shares.scale,
        };
        let threads = count / if wide { LANES } else { 1 };
        let blocks = threads.div_ceil(PERMUTE_THREADS as usize).min(ADD_SHARES_BLOCKS * self.inner.sm_count);
        let kernel = self.kernels().permute.add_shares.of(dtype);
        // SAFETY: `own` and each of the `parts - 1` blocks of `others` have `main`'s size.
        unsafe { self.launch(CALL, kernel, Grid::new(blocks, PERMUTE_THREADS), &p) }
    }

    fn page_locked(&self, dtype: DType, dims: &[usize], fill: &mut dyn FnMut(&mut [u8])) -> Result<Tensor<Self>> {
        let bytes = Shape::new(dims)?.count() * dtype.size();
        Tensor::from_buffer(self.page_locked_buffer("Cuda::page_locked", bytes, fill)?, dtype, dims)
    }

    fn beside(&self) -> Result<Self> {
        self.with_new_stream()
    }

    fn record_event(&self) -> Result<Option<Event>> {
        self.record().map(Some)
    }

    fn adopt_errors_of(&self, other: &Self) {
        self.adopt_failure_sources(other);
    }

    fn shares_stream_with(&self, other: &Self) -> bool {
        self.is_on(&other.inner.stream)
    }

    fn shares_memory_with(&self, other: &Self) -> bool {
        self.ordinal() == other.ordinal()
    }

    fn capture_number(&self) -> Option<u64> {
        self.capture_number()
    }

    fn check_not_captured_elsewhere(&self, call: &'static str) -> Result<()> {
        if self.capture_number().is_some() {
            return Ok(());
        }
        self.bind(call)?;
        match self.is_capturing().or_else(|error| self.check_failure_sources().and(Err(error)))? {
            false => Ok(()),
            true => Err(Error::not_capturable(call, "be captured by others than Cuda::capture")),
        }
    }

    fn add_capture_hook(&self, ending: &Arc<CaptureHook>) {
        self.add_capture_hook(ending);
    }
}
