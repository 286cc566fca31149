//! Prepare whose records the device writes and plans from: what a device does that runs behind the host.

use crate::comm::Tag;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorRef};

use super::core::{Core, PREPARE};
use super::record::{self, Record};
use super::{Capacity, DispatchSpec, GroupConfig, Handle, PlanRecords, RecordIds, Reporting, Transport, heard};

impl<D: Kernels> Core<D> {
    /// Whether the device plans from records.
    pub(super) fn behind(&self, transport: Transport, spec: &DispatchSpec) -> bool {
        matches!(transport, Transport::AllRows | Transport::UniqueRows)
            && spec.reporting == Reporting::Deferred
            && self.device.plans_records(spec, self.config.num_experts)
    }

    /// [`Core::prepare`] with the records written, exchanged and planned on the device. The host learns nothing of them, or, where
    /// it has to know how many rows the plan has, what it would have learned.
    pub(super) fn prepare_records(
        &mut self,
        step: (Tag, Transport),
        ids: TensorRef<'_, D>,
        spec: &DispatchSpec,
    ) -> Result<Handle<D>> {
        let mut heard = match self.heard.take() {
            Some(heard) => heard,
            None => {
                let new = self.nothing_heard();
                self.tell_own(step.0, new)?
            }
        };
        let prepared = self.exchange_records(step, ids, spec, &mut heard);
        self.heard = Some(heard);
        let (handle, pending) = prepared?;
        let Some(peer) = pending else { return Ok(handle) };
        // The same on all ranks, but for those that have asked.
        self.take_heard()?;
        let reason = "it holds an error of an earlier call".to_string();
        Err(Error::Peer { call: PREPARE, rank: self.rank(), peer, reason })
    }

    /// What the device keeps of records, before the first.
    fn nothing_heard(&self) -> Result<Tensor<D>> {
        let mut new = Tensor::empty(&self.device, DType::U8, &[heard::bytes(self.ranks())])?;
        // A copy from the host, which cannot be recorded: a fill would be noted down, and this outlives a recording.
        self.device.upload(&self.stream, &vec![0; new.bytes()], new.view_mut())?;
        Ok(new)
    }

    /// A handle, and the first rank that holds an error of an earlier call.
    fn exchange_records(
        &mut self,
        (tag, transport): (Tag, Transport),
        ids: TensorRef<'_, D>,
        spec: &DispatchSpec,
        heard: &mut Tensor<D>,
    ) -> Result<(Handle<D>, Option<usize>)> {
        let Self { device, stream, .. } = self;
        let (device, stream) = (device.clone(), stream.clone());
        let (rank, ranks, sizes) = (self.rank(), self.ranks(), self.sizes(spec));
        let GroupConfig { num_experts, max_tokens_per_rank: max_tokens, .. } = self.config;
        let own = Tensor::empty(&device, DType::U8, &[sizes.bytes()]);
        let mut own = self.tell_own(tag, own)?;
        let recorded = self.check_ids(ids, spec.top_k).and_then(|tokens| {
            let (heard, out) = (heard.view_mut(), own.view_mut());
            let ids = ids.borrow();
            device.record_ids(&stream, RecordIds { rank, num_experts, max_tokens, spec, ids, heard, out })?;
            Ok(tokens)
        });
        let tokens = match recorded {
            Ok(tokens) => tokens,
            Err(error) => return self.fail((tag, transport), spec, error),
        };
        let records = self.exchange(tag, spec, &own)?;
        let call = PlanRecords {
            rank,
            ranks,
            num_experts,
            max_tokens,
            tokens,
            spec,
            transport,
            records: records.view(),
            heard: heard.view_mut(),
        };
        let gathered = device.plan_records(&stream, call);
        let gathered = self.tell_own(tag, gathered)?;
        let Some(known) = gathered.known else {
            let absent = if spec.backward { Vec::new() } else { vec![rank] };
            return Ok((self.handle(spec, gathered.plan, absent, vec![gathered.room; ranks]), None));
        };
        if known.troubled {
            let all = device.download(&stream, records.view());
            let all = self.tell_own(tag, all)?;
            let all: Vec<Record> = all.chunks_exact(sizes.bytes()).map(|b| Record::decode(b, sizes)).collect();
            let unknown = || Error::invalid(PREPARE, "records", "what is wrong with them", "nothing");
            return Err(record::problem(&all, rank, num_experts).unwrap_or_else(unknown));
        }
        if let (Some((rank, needed)), Capacity::Static(capacity)) = (known.overflow, spec.capacity) {
            return Err(Error::Capacity { rank, needed, capacity });
        }
        let rows = if transport == Transport::AllRows { vec![gathered.room; ranks] } else { known.tokens };
        Ok((self.handle(spec, gathered.plan, known.absent, rows), known.pending.first().copied()))
    }

    /// Returns and clears what the device has found, from what it has kept of records if that is it. One error a call.
    pub(super) fn take_heard(&mut self) -> Result<()> {
        if let Some(late) = self.late.take() {
            return Err(late);
        }
        // First, as it would keep the memory below from being read.
        let raised = self.device.check(&self.stream);
        let rank = self.comm.rank();
        let Some(heard) = &mut self.heard else { return raised };
        let bytes = match self.device.download(&self.stream, heard.view()) {
            Ok(bytes) => bytes,
            Err(error) => return raised.and(Err(error)),
        };
        let kept = heard::error(&bytes, rank, self.config.num_experts);
        if kept.is_some() {
            self.device.zero(heard.view_mut().into_data())?;
        }
        let (now, late) = heard::now_and_next(raised, kept);
        self.late = late;
        now
    }
}
