//! The dispatcher's calls for low latency.
//!
//! Rows travel by rank, each with its choices and weights and, behind these, its token's number, so that they can be
//! brought into the order that slots have everywhere. The library's handles are pooled: making one cannot
//! be captured. It is a collective where a token has more choices than in any before, since the library's buffers are
//! made for these; all ranks know that alike. Otherwise it is each rank's own affair, as it follows from the layer's
//! handles that happen to be alive there.
//!
//! That relies on what the library does as of 0.2.0: it sizes a group's buffers by layout and choices, makes them anew
//! only where these grow, and numbers calls for the group, so that which of a rank's handles is used does not matter.
//! So [`NcclEpLibrary`](crate::nccl_ep::NcclEpLibrary) takes no later 0.x before somebody has looked.

mod rows;

use std::time::Duration;

use crate::comm::{Op, Tag};
use crate::cuda::Cuda;
use crate::cuda::low_latency_sort::{self, SegmentStarts};
use crate::dtype::DType;
use crate::ep::{Capacity, DispatchSpec, GroupConfig};
use crate::error::{Error, Result};
use crate::nccl_ep::NcclEpError;
use crate::nccl_ep::low_latency::{LowLatencyGroup, LowLatencyHandle, LowLatencyLayout, LowLatencyOptions};
use crate::tensor::{Tensor, TensorRef};

use super::collective::around;
use super::handle_pool::HandlePool;
use super::library_handle::{LibraryHandle, LowLatencyRouting, LowLatencyState};
use super::prepare::DeviceRouting;
use super::state::NcclEp;

/// How much longer than the communicator a kernel waits for a rank: the watchdog's error comes first, and then the
/// kernel ends by itself.
const KERNEL_PATIENCE: Duration = Duration::from_secs(1);

impl NcclEp {
    /// Choices of a token as they travel: one more carries its number.
    pub(super) fn wide(spec: &DispatchSpec) -> usize {
        spec.top_k + 1
    }

    /// For rows of so many bytes, and the library's own timeout.
    fn low_options(&self, max_row_bytes: usize) -> LowLatencyOptions {
        let GroupConfig { num_experts, max_sms, .. } = self.core.config;
        let max_tokens = self.max_tokens();
        LowLatencyOptions { num_experts, max_tokens, max_row_bytes, timeout: None, max_sms }
    }

    /// Checks a specification against low latency's rules.
    pub(super) fn low_rules(&self, spec: &DispatchSpec) -> Result<()> {
        if spec.backward {
            return Err(NcclEpError::LowLatency { what: "there is no backward" }.into());
        }
        let options = self.low_options(16);
        let sms = self.core.device.sm_count();
        options.check(self.core.ranks(), sms)?;
        options.check_top_k(Self::wide(spec), sms).map_err(|error| match error {
            // In terms of the caller's choices: one more travels.
            NcclEpError::Argument { .. } => {
                let what = "so large a top_k: one choice more than a token has travels, and the library takes no more";
                NcclEpError::LowLatency { what }.into()
            }
            other => other.into(),
        })
    }

    /// Whether kernels have gone on without a rank: what they brought is not whole, nor will be what comes. It takes a
    /// timeout below the communicator's (`NCCL_EP_TIMEOUT_MS`); else the watchdog comes first.
    pub(super) fn late(&self) -> Result<()> {
        if self.low.is_empty() || self.core.device.is_capturing()? {
            return Ok(());
        }
        for low in &self.low {
            match low.group.was_late() {
                Ok(false) => {}
                Ok(true) => {
                    // Who it was is worth less than that somebody was.
                    let active = low.group.active().unwrap_or_default();
                    let late = (0..active.len()).filter(|rank| !active[*rank]).collect();
                    return Err(NcclEpError::Late { rank: self.core.rank(), late }.into());
                }
                // A communicator that has ended says so itself.
                Err(Error::NcclEp(NcclEpError::Ended { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Checks that rows are of a type and size that low latency takes.
    pub(super) fn check_low_row(&self, dtype: DType, row: usize, scale: usize) -> Result<()> {
        let options = self.low_options(row + scale);
        options.check_sent((dtype, row), scale)?;
        // Numbers come back, and are added.
        match dtype {
            DType::U8 => Ok(()),
            _ => Ok(options.check_added(dtype, row / dtype.size(), self.core.device.sm_count())?),
        }
    }

    /// The group for rows of so many bytes; a new one is compared over the ranks first.
    fn low_group(
        &mut self,
        spec: &DispatchSpec,
        row_bytes: usize,
    ) -> Result<(LowLatencyGroup, HandlePool<LowLatencyHandle>)> {
        if let Some(low) = self.low.iter().rev().find(|low| low.row_bytes() >= row_bytes) {
            return Ok((low.group.clone(), low.pool.clone()));
        }
        self.core.device.not_captured("prepare", "create an EP group")?;
        let timeout = self.core.comm.native().map(|comm| comm.timeout() + KERNEL_PATIENCE);
        let options = LowLatencyOptions { timeout, ..self.low_options(row_bytes.next_multiple_of(16)) };
        let checked = options.check(self.core.ranks(), self.core.device.sm_count());
        self.compare(spec, (options.max_row_bytes, spec.top_k), checked)?;
        let (library, on) = (self.library.clone(), (self.core.device.clone(), self.shared.clone()));
        let tag = Tag { layer: spec.layer, op: Op::Init, sequence: self.low.len() as u64 };
        let named = ("nccl_ep_ll_group", DType::U8, row_bytes);
        let group = around(&mut self.core, named, tag, || LowLatencyGroup::on(&library, on, options))?;
        let (made, pool) = (group.clone(), HandlePool::default());
        self.low.push(LowLatencyState { group, pool: pool.clone() });
        Ok((made, pool))
    }

    /// The library's handle of a routing.
    pub(super) fn route_low(
        &mut self,
        spec: &DispatchSpec,
        (tag, row_bytes): (Tag, usize),
        ids: TensorRef<'_, Cuda>,
    ) -> Result<LibraryHandle> {
        let (group, pool) = self.low_group(spec, row_bytes)?;
        let wide = Self::wide(spec);
        let make = || {
            group.cuda().not_captured("prepare", "create an EP handle")?;
            LowLatencyHandle::new(&group, LowLatencyLayout::RankMajor, wide)
        };
        let free = match pool.grows(wide) {
            true => {
                // On all ranks, so each finds for itself that it may not.
                self.core.device.not_captured("prepare", "create an EP handle")?;
                // The library may move its buffers: nothing that uses them may be under way on any rank.
                self.core.comm.barrier(tag)?;
                let made = around(&mut self.core, ("nccl_ep_ll_handle", DType::U8, row_bytes), tag, make)?;
                pool.grown(wide);
                Some(made)
            }
            false => pool.take(wide),
        };
        let (device, bytes) = (self.core.device.clone(), group.options().max_row_bytes);
        // From here on a rank is alone: the others hear of its error where they are next.
        let routed = || {
            let mut handle = free.map_or_else(make, Ok)?;
            handle.update(low_latency_sort::packed_ids(&device, ids)?)?;
            let pooled = pool.pooled(handle, device.is_capturing()?);
            Ok(LibraryHandle::LowLatency(LowLatencyRouting { pooled, bytes, back: None }))
        };
        self.core.check_or_refuse(tag, routed())
    }

    /// Segments from the loads alone: nothing waits, and nothing else is exchanged.
    pub(super) fn plan_low_latency(
        &mut self,
        spec: &DispatchSpec,
        at: (Tag, usize),
        ids: &Tensor<Cuda>,
        loads: &Tensor<Cuda>,
    ) -> Result<DeviceRouting> {
        let (experts, ranks) = (self.core.config.num_experts, self.core.ranks());
        let (local, alignment) = (experts / ranks, spec.alignment.max(1));
        let starts = low_latency_sort::starts(&self.core.device, loads, self.core.rank() * local, local, alignment);
        let SegmentStarts { starts, total } = self.core.check_or_refuse(at.0, starts)?;
        let rows = match spec.capacity {
            Capacity::Static(rows) => rows,
            Capacity::Eager => {
                // As many as the step may need at most.
                let choices = ranks * self.max_tokens() * spec.top_k.min(local);
                choices + choices.min(local) * (alignment - 1)
            }
        };
        let routed = self.route_low(spec, at, ids.view()).map_err(|e| self.core.as_peer_error("prepare", e))?;
        Ok(DeviceRouting { routed, padded: None, starts, total, rows })
    }
}
