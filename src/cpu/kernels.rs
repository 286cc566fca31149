//! Entry points: the [`Kernels`] of the CPU.

use std::sync::Arc;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::host_memory;
use crate::kernels::*;
use crate::plan::{DevicePlan, DispatchSpec, HostPlanRequest, Plan, PlanRecords, RecordIds};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::{Cpu, element, experts, gemm, permute, plan, records, router};

impl Kernels for Cpu {
    fn linear(&self, call: Linear<'_, Self>) -> Result<()> {
        gemm::linear(call)
    }
    fn linear_bwd(&self, call: LinearBwd<'_, Self>) -> Result<()> {
        gemm::linear_bwd(call)
    }
    fn route(&self, call: Route<'_, Self>) -> Result<()> {
        router::route(call)
    }
    fn route_bwd(&self, call: RouteBwd<'_, Self>) -> Result<()> {
        router::route_bwd(call)
    }
    fn aux_sums(&self, call: AuxSums<'_, Self>) -> Result<()> {
        router::aux_sums(call)
    }
    fn aux_total(&self, call: AuxTotal<'_, Self>) -> Result<()> {
        router::aux_total(call)
    }
    fn renormalize_kept(&self, call: RenormalizeKept<'_, Self>) -> Result<()> {
        router::renormalize_kept(call)
    }
    fn plan(&self, call: HostPlanRequest<'_>) -> Result<Plan<Self>> {
        plan::plan(call)
    }
    fn plans_records(&self, spec: &DispatchSpec, _: usize) -> bool {
        records::plans(spec)
    }
    fn record_ids(&self, call: RecordIds<'_, Self>) -> Result<()> {
        records::record(call)
    }
    fn plan_records(&self, call: PlanRecords<'_, Self>) -> Result<DevicePlan<Self>> {
        records::plan(call)
    }
    fn gather_rows(&self, call: GatherRows<'_, Self>) -> Result<()> {
        permute::gather_rows(call)
    }
    fn concat_rows(&self, call: ConcatRows<'_, Self>) -> Result<()> {
        permute::concat_rows(call)
    }
    fn split_rows(&self, call: SplitRows<'_, Self>) -> Result<()> {
        permute::split_rows(call)
    }
    fn reduce_rows(&self, call: ReduceRows<'_, Self>) -> Result<()> {
        permute::reduce_rows(call)
    }
    fn up(&self, call: Up<'_, Self>) -> Result<()> {
        experts::up(call)
    }
    fn down(&self, call: Down<'_, Self>) -> Result<()> {
        experts::down(call)
    }
    fn down_bwd(&self, call: DownBwd<'_, Self>) -> Result<()> {
        experts::down_bwd(call)
    }
    fn up_dgrad(&self, call: UpDgrad<'_, Self>) -> Result<()> {
        experts::up_dgrad(call)
    }
    fn wgrad(&self, call: Wgrad<'_, Self>) -> Result<()> {
        experts::wgrad(call)
    }
    fn sigmoid(&self, call: Sigmoid<'_, Self>) -> Result<()> {
        permute::sigmoid(call)
    }
    fn single_segment(&self, rows: usize) -> Result<Arc<Segments<Self>>> {
        let offsets = Tensor::from_vec(vec![0i64], &[1])?;
        let counts = Tensor::from_vec(vec![rows as i64], &[1])?;
        Ok(Arc::new(Segments::new(offsets, counts, rows)))
    }
    fn wait(&self, _: Option<&()>) -> Result<()> {
        Ok(())
    }
    fn write(&self, values: &[f64], dtype: DType, dims: &[usize]) -> Result<Tensor<Self>> {
        element::from_f64(values, dtype, dims)
    }
    fn read(&self, tensor: TensorRef<'_, Self>) -> Result<Vec<f64>> {
        Ok(element::to_f64(tensor))
    }
    fn download(&self, from: TensorRef<'_, Self>) -> Result<Vec<u8>> {
        host_memory::copied("download", "a tensor", from.data())
    }
    fn upload(&self, from: &[u8], to: TensorMut<'_, Self>) -> Result<()> {
        self.copy(from, to.into_data())
    }
}
