//! Entry points: the [`Kernels`] of a GPU.

use std::sync::Arc;

use crate::cpu::Cpu;
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::{DevicePlan, DispatchSpec, Plan, PlanRecords, PlanRequest, RecordIds, Reporting};
use crate::error::{Error, Result};
use crate::kernels::*;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::device::{Cuda, Event, Stream, driver};
use super::{experts, linear, permute, plan, router, routing_records, wgrad};

impl Kernels for Cuda {
    const REPORTING: Reporting = Reporting::Deferred;

    fn linear(&self, stream: &Stream, call: Linear<'_, Self>) -> Result<()> {
        self.on_stream("linear", stream)?;
        linear::linear(self, call)
    }
    fn linear_bwd(&self, stream: &Stream, call: LinearBwd<'_, Self>) -> Result<()> {
        self.on_stream("linear_bwd", stream)?;
        linear::linear_bwd(self, call)
    }
    fn route(&self, stream: &Stream, call: Route<'_, Self>) -> Result<()> {
        self.on_stream("route", stream)?;
        router::route(self, call)
    }
    fn route_bwd(&self, stream: &Stream, call: RouteBwd<'_, Self>) -> Result<()> {
        self.on_stream("route_bwd", stream)?;
        router::route_bwd(self, call)
    }
    fn aux_sums(&self, stream: &Stream, call: AuxSums<'_, Self>) -> Result<()> {
        self.on_stream("aux_sums", stream)?;
        router::aux_sums(self, call)
    }
    fn aux_total(&self, stream: &Stream, call: AuxTotal<'_, Self>) -> Result<()> {
        self.on_stream("aux_total", stream)?;
        router::aux_total(self, call)
    }
    fn keep_sum(&self, stream: &Stream, call: KeepSum<'_, Self>) -> Result<()> {
        self.on_stream("keep_sum", stream)?;
        router::keep_sum(self, call)
    }
    fn plan(&self, stream: &Stream, call: PlanRequest<'_, Cpu>) -> Result<Plan<Self>> {
        self.on_stream("plan", stream)?;
        plan::plan(self, call)
    }
    fn plan_on_device(&self, stream: &Stream, call: PlanRequest<'_, Self>) -> Result<Option<Plan<Self>>> {
        self.on_stream("plan_on_device", stream)?;
        plan::plan_on_device(self, call)
    }
    fn plans_records(&self, spec: &DispatchSpec, num_experts: usize) -> bool {
        routing_records::plans(spec, num_experts)
    }
    fn record_ids(&self, stream: &Stream, call: RecordIds<'_, Self>) -> Result<()> {
        self.on_stream("record_ids", stream)?;
        routing_records::record(self, call)
    }
    fn plan_records(&self, stream: &Stream, call: PlanRecords<'_, Self>) -> Result<DevicePlan<Self>> {
        self.on_stream("plan_records", stream)?;
        routing_records::plan(self, call)
    }
    fn check(&self, stream: &Stream) -> Result<()> {
        self.on_stream("check", stream)?;
        self.faults("check")
    }
    fn orders_rows(&self, dtype: DType, columns: usize) -> bool {
        wgrad::orders_rows(self, dtype, columns)
    }
    fn gather_rows(&self, stream: &Stream, call: GatherRows<'_, Self>) -> Result<()> {
        self.on_stream("gather_rows", stream)?;
        permute::gather_rows(self, call)
    }
    fn concat_rows(&self, stream: &Stream, call: ConcatRows<'_, Self>) -> Result<()> {
        self.on_stream("concat_rows", stream)?;
        permute::concat_rows(self, call)
    }
    fn split_rows(&self, stream: &Stream, call: SplitRows<'_, Self>) -> Result<()> {
        self.on_stream("split_rows", stream)?;
        permute::split_rows(self, call)
    }
    fn reduce_rows(&self, stream: &Stream, call: ReduceRows<'_, Self>) -> Result<()> {
        self.on_stream("reduce_rows", stream)?;
        permute::reduce_rows(self, call)
    }
    fn up(&self, stream: &Stream, call: Up<'_, Self>) -> Result<()> {
        self.on_stream("up", stream)?;
        experts::up(self, call)
    }
    fn down(&self, stream: &Stream, call: Down<'_, Self>) -> Result<()> {
        self.on_stream("down", stream)?;
        experts::down(self, call)
    }
    fn down_bwd(&self, stream: &Stream, call: DownBwd<'_, Self>) -> Result<()> {
        self.on_stream("down_bwd", stream)?;
        experts::down_bwd(self, call)
    }
    fn up_dgrad(&self, stream: &Stream, call: UpDgrad<'_, Self>) -> Result<()> {
        self.on_stream("up_dgrad", stream)?;
        experts::up_dgrad(self, call)
    }
    fn wgrad(&self, stream: &Stream, call: Wgrad<'_, Self>) -> Result<()> {
        self.on_stream("wgrad", stream)?;
        wgrad::wgrad(self, call)
    }
    fn sigmoid(&self, stream: &Stream, call: Sigmoid<'_, Self>) -> Result<()> {
        self.on_stream("sigmoid", stream)?;
        linear::sigmoid(self, call)
    }
    fn single_segment(&self, stream: &Stream, rows: usize) -> Result<Arc<Segments<Self>>> {
        self.on_stream("single_segment", stream)?;
        let offsets = Tensor::zeros(self, DType::I64, &[1])?;
        let mut counts = Tensor::empty(self, DType::I64, &[1])?;
        self.fill_word(counts.view_mut(), rows as u64)?;
        Ok(Arc::new(Segments::new(offsets, counts, rows)))
    }
    fn wait(&self, stream: &Stream, event: Option<&Event>) -> Result<()> {
        self.on_stream("wait", stream)?;
        event.map_or(Ok(()), |e| self.inner.stream.wait(&e.0).map_err(driver("wait", "wait for an event")))
    }
    fn write(&self, stream: &Stream, values: &[f64], dtype: DType, dims: &[usize]) -> Result<Tensor<Self>> {
        self.on_stream("write", stream)?;
        Cpu::new().write(&(), values, dtype, dims)?.to(self, stream)
    }
    fn read(&self, stream: &Stream, tensor: TensorRef<'_, Self>) -> Result<Vec<f64>> {
        self.on_stream("read", stream)?;
        Ok(self.to_host(tensor)?.to_f64())
    }
    fn download(&self, stream: &Stream, from: TensorRef<'_, Self>) -> Result<Vec<u8>> {
        const CALL: &str = "download";
        self.on_stream(CALL, stream)?;
        let mut bytes = vec![0; <Self as Device>::len(from.data())];
        self.read_bytes(CALL, from.data().ptr, &mut bytes)?;
        self.faults(CALL)?;
        Ok(bytes)
    }
    fn upload(&self, stream: &Stream, from: &[u8], to: TensorMut<'_, Self>) -> Result<()> {
        const CALL: &str = "upload";
        self.on_stream(CALL, stream)?;
        let to = to.into_data();
        Error::check_shape(CALL, "to", &[from.len()], &[<Self as Device>::len_mut(&to)])?;
        match from.is_empty() {
            true => Ok(()),
            false => self.write_bytes(CALL, to.ptr, from),
        }
    }
}
