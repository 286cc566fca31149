//! The library's groups and handles for what a spec asks for.

use crate::comm::{Op, Tag};
use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::reports::gather_reports;
use crate::ep::{Capacity, DispatchSpec, Handle};
use crate::error::{Error, Result};
use crate::nccl_ep::NcclEpError;
use crate::nccl_ep::high_throughput::{
    self, GroupPlace, HandleOptions, HighThroughputGroup, HighThroughputOptions, UpdateCounters,
};
use crate::tensor::{Tensor, TensorRef};

use super::collective::around;
use super::library_handle::{LibraryHandle, LowLatencyState};
use super::prepare::plans_on_device;
use super::state::{Algorithm, NcclEp};

/// Mark before the error text of a rank that fails.
const FAILED: char = '!';

impl NcclEp {
    /// Checks a specification against the library's rules.
    pub(super) fn rules(&self, spec: &DispatchSpec) -> Result<()> {
        if let Some((dtype, width)) = spec.returns {
            self.check_words(dtype, width * dtype.size(), 0)?;
        }
        if self.mode == Algorithm::LowLatency {
            return self.late().and_then(|()| self.low_rules(spec));
        }
        match spec.capacity {
            Capacity::Static(found) if !found.is_multiple_of(spec.alignment.max(1)) => {
                let expected = format!("a multiple of the alignment {}", spec.alignment);
                Err(NcclEpError::Capacity { expected, found }.into())
            }
            _ => Ok(()),
        }
    }

    /// Most tokens of a rank, as the library takes them: by fours.
    pub(super) fn max_tokens(&self) -> usize {
        self.core.config.max_tokens_per_rank.next_multiple_of(4)
    }

    /// Bytes of the rows that were met last.
    pub(super) fn known_row(&self) -> Option<usize> {
        match self.mode {
            Algorithm::HighThroughput => self.groups.last().map(|g| g.options().max_row_bytes),
            Algorithm::LowLatency => self.low.last().map(LowLatencyState::row_bytes),
        }
    }

    /// The capacity of the library's group. It has none below the tokens of a rank: what the host has planned to fit
    /// there goes through a group that is open.
    pub(super) fn fixed(&self, spec: &DispatchSpec) -> Option<usize> {
        match spec.capacity {
            Capacity::Static(rows) => Some(rows).filter(|rows| *rows >= self.max_tokens()),
            Capacity::Eager => None,
        }
    }

    /// The group for rows of so many bytes; a new one is compared over the ranks first.
    pub(super) fn group(&mut self, spec: &DispatchSpec, row_bytes: usize) -> Result<HighThroughputGroup> {
        let capacity = self.fixed(spec);
        // The host's plan fits, so the library need not look for rows to drop, nor clear memory for them.
        let trap = !plans_on_device(spec);
        let windows = capacity.is_some() && self.core.config.windows > 0;
        let fits = |o: &HighThroughputOptions| {
            let policy = capacity.is_none() || o.trap == trap;
            o.capacity == capacity && policy && o.max_row_bytes >= row_bytes && o.max_top_k >= spec.top_k
        };
        let same = |g: &&HighThroughputGroup| g.places().is_some() == windows && fits(g.options());
        if let Some(group) = self.groups.iter().rev().find(same) {
            return Ok(group.clone());
        }
        self.core.device.not_captured("prepare", "create an EP group")?;
        let options = self.options(spec, row_bytes);
        self.compare(spec, (options.max_row_bytes, options.max_top_k), options.check(self.core.ranks()))?;
        let library = self.library.clone();
        let (cuda, comm) = (self.core.device.clone(), self.shared.clone());
        let place = GroupPlace { cuda, comm, windows: windows.then(|| self.places.clone()) };
        let tag = Tag { layer: spec.layer, op: Op::Init, sequence: self.groups.len() as u64 };
        let group = around(&mut self.core, ("nccl_ep_group", DType::U8, row_bytes), tag, || {
            HighThroughputGroup::on(&library, place, options)
        })?;
        self.groups.push(group.clone());
        Ok(group)
    }

    /// Options of a new group for rows of so many bytes, which serves the rows that were met before too.
    pub(super) fn options(&self, spec: &DispatchSpec, row_bytes: usize) -> HighThroughputOptions {
        let known =
            |of: fn(&HighThroughputOptions) -> usize| self.groups.iter().map(|g| of(g.options())).max().unwrap_or(0);
        HighThroughputOptions {
            num_experts: self.core.config.num_experts,
            max_tokens: self.max_tokens(),
            capacity: self.fixed(spec),
            max_row_bytes: row_bytes.max(known(|o| o.max_row_bytes)),
            max_top_k: spec.top_k.max(known(|o| o.max_top_k)),
            trap: !plans_on_device(spec),
            max_sms: self.core.config.max_sms,
        }
    }

    /// Refuses options in which the ranks differ: the library does not look.
    pub(super) fn compare(
        &mut self,
        spec: &DispatchSpec,
        (bytes, top_k): (usize, usize),
        checked: std::result::Result<(), NcclEpError>,
    ) -> Result<()> {
        let own = format!("{bytes:?} bytes, top_k {top_k}");
        // A failed rank's report begins with a mark.
        let failed = checked.as_ref().err().map(|error| format!("{FAILED}{error}"));
        let all = gather_reports(&mut self.core, failed.as_ref().unwrap_or(&own))?;
        checked?;
        let failure = |(peer, text): (usize, &String)| Some((peer, text.strip_prefix(FAILED)?.to_string()));
        if let Some((peer, reason)) = all.iter().enumerate().find_map(failure) {
            return Err(Error::Peer { call: "prepare", rank: self.core.rank(), peer, reason });
        }
        match all.iter().position(|theirs| *theirs != own) {
            None => Ok(()),
            Some(peer) => Err(Error::ConfigMismatch {
                call: "prepare",
                field: format!("rows of layer {}", spec.layer),
                rank: self.core.rank(),
                value: own,
                peer,
                peer_value: all[peer].clone(),
            }),
        }
    }

    /// The library's handle of a planned routing, for rows of so many bytes.
    pub(super) fn route(&mut self, handle: &Handle<Cuda>, row_bytes: usize) -> Result<LibraryHandle> {
        let spec = handle.spec();
        if self.mode == Algorithm::LowLatency {
            return self.route_low(spec, (DispatcherState::tag(handle, Op::Prepare), row_bytes), handle.kept_ids());
        }
        // The plan has its counters already.
        let at = (DispatcherState::tag(handle, Op::Prepare), row_bytes);
        self.route_high(spec, at, handle.kept_ids()).map(|(routed, _)| LibraryHandle::HighThroughput(routed))
    }

    /// The library's handle of a routing for high throughput, and its counters: padded rows of each local expert, the
    /// first of each, and rows in all.
    pub(super) fn route_high(
        &mut self,
        spec: &DispatchSpec,
        (tag, row_bytes): (Tag, usize),
        ids: TensorRef<'_, Cuda>,
    ) -> Result<(high_throughput::HighThroughputHandle, [Tensor<Cuda>; 3])> {
        let group = self.group(spec, row_bytes)?;
        // The most memory of a prepare, so before what the others wait in.
        let made = self.new_high_throughput(&group, spec);
        let (mut routed, [mut counts, mut offsets, mut total]) = self.core.check_or_refuse(tag, made)?;
        around(&mut self.core, ("nccl_ep_update", DType::U8, row_bytes), tag, || {
            let counters =
                UpdateCounters { counts: counts.view_mut(), offsets: offsets.view_mut(), total: total.view_mut() };
            routed.update(ids, counters)
        })?;
        Ok((routed, [counts, offsets, total]))
    }

    /// The same before its first update.
    fn new_high_throughput(
        &self,
        group: &HighThroughputGroup,
        spec: &DispatchSpec,
    ) -> Result<(high_throughput::HighThroughputHandle, [Tensor<Cuda>; 3])> {
        let of = |size| self.empty(DType::I64, &[size]);
        let local = group.local_experts();
        let counters = [of(local)?, of(local)?, of(1)?];
        let options = HandleOptions { top_k: spec.top_k, alignment: spec.alignment };
        Ok((high_throughput::HighThroughputHandle::new(group, options)?, counters))
    }
}
