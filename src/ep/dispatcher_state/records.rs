//! The ranks' records of a prepare: this rank's own, their exchange by the transport or an all-gather, and how a rank
//! takes part that has failed.

use crate::comm::Tag;
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};
use crate::kernels::{Kernels, Origin};
use crate::plan::routing_record::{self, RecordSizes, RecordStatus, RoutingRecord};
use crate::plan::waits;
use crate::tensor::{Tensor, TensorRef};

use super::{DispatcherState, PREPARE};
use crate::ep::{DispatchSpec, Reporting, RowOrder};

impl<D: Kernels> DispatcherState<D> {
    /// Checks this rank's choices and packs them.
    pub(super) fn own_record(
        &mut self,
        ids: TensorRef<'_, D>,
        weights: Option<TensorRef<'_, D>>,
        spec: &DispatchSpec,
    ) -> Result<RoutingRecord> {
        let k = spec.top_k;
        let tokens = self.check_ids(ids, spec)?;
        let weights = match (routing_record::needs_weights(spec), weights) {
            (false, _) => Vec::new(),
            (true, None) => {
                let needed = "weights, to keep by probability";
                return Err(Error::invalid(PREPARE, "tensor topk_weights", needed, "none"));
            }
            (true, Some(w)) => self.device.read(w)?,
        };
        let bytes = self.device.download(ids)?;
        let origin = Origin { rank: self.rank(), layer: spec.layer };
        let (ids, bad) = routing_record::mask_bad_ids(&bytes, ids.dtype(), origin, k, self.config.num_experts)?;
        let status = match (self.deferred.take(), bad) {
            // A deferred error that nobody asked for comes first.
            (Some(bad), _) => RecordStatus::BadId(bad),
            (None, None) => RecordStatus::Ready,
            (None, Some(bad)) if spec.reporting == Reporting::Deferred => RecordStatus::Deferred(bad),
            (None, Some(bad)) => RecordStatus::BadId(bad),
        };
        let (fields, values, backward) = (routing_record::fields(spec), *spec.formula.values(), spec.backward);
        Ok(RoutingRecord { status, fields, values, backward, pending: false, tokens, ids, weights })
    }

    /// Most tokens of a rank in a call.
    pub(in crate::ep) fn max_tokens(&self, spec: &DispatchSpec) -> usize {
        spec.max_tokens.unwrap_or(self.config.max_tokens_per_rank)
    }

    pub(in crate::ep) fn sizes(&self, spec: &DispatchSpec) -> RecordSizes {
        let weights = routing_record::needs_weights(spec);
        RecordSizes { max_tokens: self.max_tokens(spec), top_k: spec.top_k, weights }
    }

    /// Takes part as a failure and returns this rank's error. Hosts that do not read records have to be told otherwise.
    pub(in crate::ep) fn fail<T>(
        &mut self,
        tag: Tag,
        row_order: RowOrder,
        spec: &DispatchSpec,
        error: Error,
    ) -> Result<T> {
        if self.plans_on_device(row_order, spec) && !waits(row_order, spec) {
            return self.check_in_step(tag, Err(error));
        }
        // The rank returns its own error, whatever becomes of the exchange.
        if self.ranks() > 1 {
            let _ = self.gather(tag, spec, &RoutingRecord::failed(RecordStatus::Failed(error.to_string())));
        }
        Err(error)
    }

    /// Every rank's record, in rank order.
    pub(super) fn gather(&mut self, tag: Tag, spec: &DispatchSpec, own: &RoutingRecord) -> Result<Vec<RoutingRecord>> {
        let sizes = self.sizes(spec);
        let send = Tensor::empty(&self.device, DType::U8, &[sizes.bytes()]).and_then(|mut send| {
            self.device.upload(&own.encode(sizes)?, send.view_mut())?;
            Ok(send)
        });
        let send = self.refuse_own_error(tag, send)?;
        let recv = self.exchange(tag, spec, &send)?;
        let bytes = self.device.download(recv.view());
        let bytes = self.refuse_own_error(tag, bytes)?;
        Ok(bytes.chunks_exact(sizes.bytes()).map(|b| RoutingRecord::decode(b, sizes)).collect())
    }

    /// The same as the device has them.
    pub(in crate::ep) fn exchange(&mut self, tag: Tag, spec: &DispatchSpec, own: &Tensor<D>) -> Result<Tensor<D>> {
        let gathered = self.gather_records(tag, own);
        self.exchanged(spec, gathered)
    }

    /// What an exchange of records comes to: it counts as a prepare, or its error is told in terms of that.
    pub(in crate::ep) fn exchanged<T>(&mut self, spec: &DispatchSpec, result: Result<T>) -> Result<T> {
        match result {
            Ok(all) => {
                self.sequence += 1;
                Ok(all)
            }
            Err(Error::Comm(CommError::SizeMismatch { rank, peer, expected, found, .. })) => {
                let what = format!("a routing record of {expected} bytes (top_k = {})", spec.top_k);
                let field = "spec.top_k, spec.max_tokens or spec.expert_capacity".to_string();
                let peer_value = format!("a routing record of {found} bytes");
                Err(Error::ConfigMismatch { call: PREPARE, field, rank, value: what, peer, peer_value })
            }
            Err(error) => Err(self.as_peer_error(PREPARE, error)),
        }
    }

    fn gather_records(&mut self, tag: Tag, own: &Tensor<D>) -> Result<Tensor<D>> {
        let rank = self.rank();
        if let Some(records) = &mut self.records
            && let Some(all) = records.exchange(&mut *self.comm, tag, rank, own.view())?
        {
            return Ok(all);
        }
        let recv = Tensor::empty(&self.device, DType::U8, &[self.ranks(), own.bytes()]);
        let mut recv = self.refuse_own_error(tag, recv)?;
        self.comm.all_gather(tag, own.view(), recv.view_mut())?;
        Ok(recv)
    }
}
