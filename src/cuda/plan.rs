//! Layouts: the plan of a step, and groups of one rank.
//!
//! Prepare has the ids on the host already, to check them, and an eager layout's size is the host's to know; so the
//! plan is made there, by the CPU's code, and its maps are copied over.

use std::sync::Arc;

use crate::comm::Solo;
use crate::cpu::Cpu;
use crate::ep::{Group, GroupConfig, Plan, PlanRequest};
use crate::error::Result;
use crate::kernels::{Kernels, Zones};
use crate::tensor::{Tensor, TensorRef};

use super::device::Cuda;

impl Cuda {
    /// A host tensor on the GPU.
    ///
    /// # Errors
    /// A driver's error.
    pub fn tensor(&self, from: &Tensor<Cpu>) -> Result<Tensor<Cuda>> {
        let mut to = Tensor::empty(self, from.dtype(), from.dims())?;
        self.upload(&self.stream(), from.as_bytes(), to.view_mut())?;
        Ok(to)
    }

    /// A tensor of the GPU on the host; waits for the stream.
    ///
    /// # Errors
    /// A fault of an earlier kernel, or a driver's error.
    pub fn to_host(&self, from: TensorRef<'_, Cuda>) -> Result<Tensor<Cpu>> {
        let mut to = Tensor::empty(&Cpu::new(), from.dtype(), from.dims())?;
        let bytes = self.download(&self.stream(), from)?;
        to.as_bytes_mut().copy_from_slice(&bytes);
        Ok(to)
    }

    /// A group of one rank on this GPU.
    ///
    /// # Errors
    /// As [`Group::new`].
    pub fn group(&self, config: GroupConfig) -> Result<Group<Cuda>> {
        Group::new(self.clone(), self.stream(), Box::new(Solo::new(self.clone())), config)
    }
}

pub(super) fn plan(device: &Cuda, call: PlanRequest<'_, Cuda>) -> Result<Plan<Cuda>> {
    let ids = device.to_host(call.ids)?;
    let weights = call.weights.map(|w| device.to_host(w)).transpose()?;
    let plan = Cpu::new().plan(
        &(),
        PlanRequest {
            rank: call.rank,
            ranks: call.ranks,
            num_experts: call.num_experts,
            ids: ids.view(),
            weights: weights.as_ref().map(Tensor::view),
            tokens: call.tokens,
            spec: call.spec,
            transport: call.transport,
        },
    )?;
    let optional = |t: &Option<Tensor<Cpu>>| t.as_ref().map(|t| device.tensor(t)).transpose();
    Ok(Plan {
        tokens: plan.tokens,
        total_tokens: plan.total_tokens,
        first_token: plan.first_token,
        zones: Arc::new(Zones {
            offsets: device.tensor(&plan.zones.offsets)?,
            counts: device.tensor(&plan.zones.counts)?,
            rows: plan.zones.rows,
        }),
        padded_counts: plan.padded_counts,
        needed_rows: plan.needed_rows,
        expert_load: plan.expert_load,
        dropped: plan.dropped,
        kept_ids: device.tensor(&plan.kept_ids)?,
        row_map: device.tensor(&plan.row_map)?,
        weight_map: device.tensor(&plan.weight_map)?,
        return_map: device.tensor(&plan.return_map)?,
        send_tokens: optional(&plan.send_tokens)?,
        send_choices: optional(&plan.send_choices)?,
        return_slots: optional(&plan.return_slots)?,
        send_rows: plan.send_rows,
        recv_rows: plan.recv_rows,
        slots_from: plan.slots_from,
        slots_at: plan.slots_at,
    })
}
