//! Entry points: the [`Kernels`] of a GPU.

use std::sync::Arc;

use crate::cpu::Cpu;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::*;
use crate::plan::{DevicePlan, DispatchSpec, HostPlanRequest, Plan, PlanRecords, PlanRequest, RecordIds, Reporting};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::device::{Cuda, Event};
use super::driver::driver;
use super::{experts, linear, permute, plan, route_plan, router, routing_records, wgrad};

impl Kernels for Cuda {
    const REPORTING: Reporting = Reporting::Deferred;

    fn linear(&self, call: Linear<'_, Self>) -> Result<()> {
        linear::linear(self, call)
    }
    fn linear_bwd(&self, call: LinearBwd<'_, Self>) -> Result<()> {
        linear::linear_bwd(self, call)
    }
    fn route(&self, call: Route<'_, Self>) -> Result<()> {
        router::route(self, call)
    }
    fn route_bwd(&self, call: RouteBwd<'_, Self>) -> Result<()> {
        router::route_bwd(self, call)
    }
    fn aux_sums(&self, call: AuxSums<'_, Self>) -> Result<()> {
        router::aux_sums(self, call)
    }
    fn aux_total(&self, call: AuxTotal<'_, Self>) -> Result<()> {
        router::aux_total(self, call)
    }
    fn renormalize_kept(&self, call: RenormalizeKept<'_, Self>) -> Result<()> {
        router::renormalize_kept(self, call)
    }
    fn plan(&self, call: HostPlanRequest<'_>) -> Result<Plan<Self>> {
        plan::plan(self, call)
    }
    fn plan_on_device(&self, call: PlanRequest<'_, Self>) -> Result<Option<Plan<Self>>> {
        plan::plan_on_device(self, call)
    }
    fn route_and_plan(&self, call: RouteAndPlan<'_, Self>) -> Result<Option<RoutedPlan<Self>>> {
        route_plan::route_and_plan(self, call)
    }
    fn plans_records(&self, spec: &DispatchSpec, num_experts: usize) -> bool {
        routing_records::plans(spec, num_experts)
    }
    fn record_ids(&self, call: RecordIds<'_, Self>) -> Result<()> {
        routing_records::record(self, call)
    }
    fn plan_records(&self, call: PlanRecords<'_, Self>) -> Result<DevicePlan<Self>> {
        routing_records::plan(self, call)
    }
    fn check(&self) -> Result<()> {
        self.faults("check")
    }
    fn products_wait(&self, dtype: DType, sizes: [usize; 2]) -> bool {
        experts::products_wait(self, dtype, sizes)
    }
    fn list_tiles(&self, segments: &Segments<Self>) -> Result<()> {
        experts::list_tiles(self, segments)
    }
    fn orders_rows(&self, dtype: DType, columns: usize) -> bool {
        wgrad::orders_rows(self, dtype, columns)
    }
    fn gather_rows(&self, call: GatherRows<'_, Self>) -> Result<()> {
        permute::gather_rows(self, call)
    }
    fn concat_rows(&self, call: ConcatRows<'_, Self>) -> Result<()> {
        permute::concat_rows(self, call)
    }
    fn split_rows(&self, call: SplitRows<'_, Self>) -> Result<()> {
        permute::split_rows(self, call)
    }
    fn reduce_rows(&self, call: ReduceRows<'_, Self>) -> Result<()> {
        permute::reduce_rows(self, call)
    }
    fn up(&self, call: Up<'_, Self>) -> Result<()> {
        experts::up(self, call)
    }
    fn down(&self, call: Down<'_, Self>) -> Result<()> {
        experts::down(self, call)
    }
    fn down_bwd(&self, call: DownBwd<'_, Self>) -> Result<()> {
        experts::down_bwd(self, call)
    }
    fn up_dgrad(&self, call: UpDgrad<'_, Self>) -> Result<()> {
        experts::up_dgrad(self, call)
    }
    fn wgrad(&self, call: Wgrad<'_, Self>) -> Result<()> {
        wgrad::wgrad(self, call)
    }
    fn sigmoid(&self, call: Sigmoid<'_, Self>) -> Result<()> {
        linear::sigmoid(self, call)
    }
    fn single_segment(&self, rows: usize) -> Result<Arc<Segments<Self>>> {
        let offsets = Tensor::zeros(self, DType::I64, &[1])?;
        let mut counts = Tensor::empty(self, DType::I64, &[1])?;
        self.fill_word(counts.view_mut(), rows as u64)?;
        Ok(Arc::new(Segments::new(offsets, counts, rows)))
    }
    fn wait(&self, event: Option<&Event>) -> Result<()> {
        event.map_or(Ok(()), |e| self.inner.stream.wait(&e.0).map_err(driver("wait", "wait for an event")))
    }
    fn write(&self, values: &[f64], dtype: DType, dims: &[usize]) -> Result<Tensor<Self>> {
        Cpu::new().write(values, dtype, dims)?.to(self)
    }
    fn read(&self, tensor: TensorRef<'_, Self>) -> Result<Vec<f64>> {
        Ok(self.to_host(tensor)?.to_f64())
    }
    fn download(&self, from: TensorRef<'_, Self>) -> Result<Vec<u8>> {
        let bytes = self.download_unchecked(from)?;
        self.faults("download")?;
        Ok(bytes)
    }
    fn download_unchecked(&self, from: TensorRef<'_, Self>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; <Self as Device>::len(from.data())];
        self.read_bytes("download", from.data().ptr, &mut bytes)?;
        Ok(bytes)
    }
    fn upload(&self, from: &[u8], to: TensorMut<'_, Self>) -> Result<()> {
        const CALL: &str = "upload";
        let to = to.into_data();
        Error::check_shape(CALL, "to", &[from.len()], &[<Self as Device>::len_mut(&to)])?;
        match from.is_empty() {
            true => Ok(()),
            false => self.write_bytes(CALL, to.ptr, from),
        }
    }
}

impl Cuda {
    /// A tensor of the GPU on the host; waits for the stream.
    ///
    /// # Errors
    /// A fault of an earlier kernel, or a driver's error.
    pub fn to_host(&self, from: TensorRef<'_, Cuda>) -> Result<Tensor<Cpu>> {
        let mut to = Tensor::empty(&Cpu::new(), from.dtype(), from.dims())?;
        let bytes = self.download(from)?;
        to.as_bytes_mut().copy_from_slice(&bytes);
        Ok(to)
    }
}
