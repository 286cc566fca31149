//! Parameters back to tensors on disk, and ranks' shares to one.

use std::collections::BTreeMap;

use super::convert::RowPlacement;
use super::layout::DiskMatrix;
use super::open::Checkpoint;
use super::options::{BlockBytes, LoadOptions};
use super::params::BlockParams;
use crate::config::MoeConfig;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layer::{ParamKind, PerParam};
use crate::tensor::Tensor;

/// Joins the ranks' shares of a block, in rank order: experts are concatenated, replicated parameters are the first
/// rank's. Gradients of replicated parameters are each rank's share: sum them before.
///
/// # Errors
/// No share, or shares of different shapes, types or sets of tensors.
pub fn gather_blocks(shares: Vec<BlockParams>) -> Result<BlockParams> {
    const CALL: &str = "gather_blocks";
    let Some(first) = shares.first() else { return Err(Error::invalid(CALL, "shares", "at least one", 0)) };
    let mut tensors = std::collections::HashMap::new();
    for kind in ParamKind::ALL {
        let name = kind.name();
        let given = shares.iter().filter(|share| share.get(kind).is_some()).count();
        if given != 0 && given != shares.len() {
            let found = format!("one on {given} of {} ranks", shares.len());
            return Err(Error::invalid(CALL, format!("tensor {name}"), "one on every rank, or on none", found));
        }
        let Some(one) = first.get(kind) else { continue };
        let take = if !kind.is_replicated() { shares.len() } else { 1 };
        let mut dims = one.dims().to_vec();
        if let Some(experts) = dims.first_mut().filter(|_| take > 1) {
            *experts = experts.saturating_mul(take);
        }
        let mut whole = Tensor::<Cpu>::empty(&Cpu::new(), one.dtype(), &dims)?;
        for (share, bytes) in shares[..take].iter().zip(whole.as_bytes_mut().chunks_exact_mut(one.bytes().max(1))) {
            let Some(part) = share.get(kind) else { continue };
            Error::check_shape(CALL, name, one.dims(), part.dims())?;
            Error::check_dtype(CALL, name, one.dtype(), part.dtype())?;
            bytes.copy_from_slice(part.as_bytes());
        }
        tensors.insert(kind, whole);
    }
    BlockParams::of(CALL, tensors.into_iter().collect())
}

/// A tensor on disk that is to be made of parameters.
#[derive(Debug)]
pub(super) struct PlannedTensor {
    pub name: String,
    pub dtype: DType,
    pub dims: Vec<usize>,
    /// Its matrices.
    parts: Vec<ExpertMatrix>,
}

/// A matrix of a tensor on disk.
#[derive(Debug)]
pub(super) struct ExpertMatrix {
    /// The expert it belongs to, counted from the first of the parameters'.
    pub expert: usize,
    pub part: DiskMatrix,
}

impl PlannedTensor {
    /// Makes the tensor.
    pub fn build(&self, params: &BlockParams, local: usize) -> Result<Tensor<Cpu>> {
        let mut whole = Tensor::empty(&Cpu::new(), self.dtype, &self.dims)?;
        for ExpertMatrix { expert, part } in &self.parts {
            let bytes = disk_bytes(part, params, *expert, local)?;
            whole.as_bytes_mut()[part.slice * bytes.len()..][..bytes.len()].copy_from_slice(&bytes);
        }
        Ok(whole)
    }

    /// Its matrices in the order in which they lie on disk, back to back.
    pub fn parts(&self) -> &[ExpertMatrix] {
        &self.parts
    }
}

/// One matrix as it lies on disk, of `local` experts' parameters.
fn disk_bytes(part: &DiskMatrix, params: &BlockParams, expert: usize, local: usize) -> Result<Vec<u8>> {
    let missing = || Error::invalid("Checkpoint::save", part.kind.name(), "a tensor", "none");
    let tensor = params.get(part.kind).ok_or_else(missing)?;
    let matrix = match part.kind.is_replicated() {
        false => {
            let one = tensor.bytes() / local;
            &tensor.as_bytes()[expert * one..][..one]
        }
        true => tensor.as_bytes(),
    };
    let size = tensor.dtype().size();
    let mut disk = vec![0; part.out * part.inn * size];
    let columns = if part.transposed { part.out } else { part.inn };
    let place = RowPlacement { first: 0, columns, transposed: part.transposed, rows: part.rows, inn: part.inn };
    place.extract(matrix, &mut disk, size);
    Ok(disk)
}

impl Checkpoint {
    pub(super) fn scatter(
        &self,
        layer: usize,
        params: &BlockParams,
        options: LoadOptions,
    ) -> Result<Vec<(String, Tensor<Cpu>)>> {
        const CALL: &str = "Checkpoint::disk_tensors";
        let local = options.experts(CALL, self.block(layer)?.router.num_experts)?.len();
        let planned = self.plan(CALL, layer, params, options)?;
        planned.into_iter().map(|tensor| Ok((tensor.name.clone(), tensor.build(params, local)?))).collect()
    }

    /// The tensors on disk that one rank's parameters make, by name.
    fn plan(
        &self,
        call: &'static str,
        layer: usize,
        params: &BlockParams,
        options: LoadOptions,
    ) -> Result<Vec<PlannedTensor>> {
        let experts = options.experts(call, self.block(layer)?.router.num_experts)?;
        let mut tensors = self.plan_whole(call, layer, params, options)?;
        let shared = |tensor: &&PlannedTensor| tensor.parts.len() > 1 && options.ranks > 1;
        if let Some(tensor) = tensors.iter().find(shared) {
            let slices = tensor.parts.len();
            let expected = format!("all {slices} experts, as gather_blocks joins them: one tensor holds them");
            return Err(Error::invalid(call, &tensor.name, expected, format!("those of rank {}", options.rank)));
        }
        let own = |of: &ExpertMatrix| of.part.kind.is_replicated() || experts.contains(&of.expert);
        tensors.retain(|tensor| tensor.parts.iter().all(own));
        for ExpertMatrix { expert, part } in tensors.iter_mut().flat_map(|tensor| &mut tensor.parts) {
            *expert -= if part.kind.is_replicated() { 0 } else { experts.start };
        }
        Ok(tensors)
    }

    /// The tensors on disk that all ranks' parameters make, by name, of the types of one rank's.
    fn plan_whole(
        &self,
        call: &'static str,
        layer: usize,
        params: &BlockParams,
        options: LoadOptions,
    ) -> Result<Vec<PlannedTensor>> {
        let config = self.block(layer)?;
        let experts = options.experts(call, config.router.num_experts)?;
        params.check(call, config, experts.len())?;
        Ok(self.plan_all(layer, config, &params.per_param().map(|_, t| t.map(Tensor::dtype))))
    }

    /// The same of parameters of these types.
    pub(super) fn plan_all(
        &self,
        layer: usize,
        config: &MoeConfig,
        dtypes: &PerParam<Option<DType>>,
    ) -> Vec<PlannedTensor> {
        let layout = self.layout(layer, config);
        let mut tensors: BTreeMap<String, PlannedTensor> = BTreeMap::new();
        let replicated = layout.replicated().into_iter().map(|part| (0, part));
        let routed =
            (0..config.router.num_experts).flat_map(|e| layout.expert(e).into_iter().map(move |part| (e, part)));
        for (expert, part) in replicated.chain(routed) {
            let Some(dtype) = dtypes[part.kind] else { continue };
            let planned = tensors.entry(part.name.clone()).or_insert_with(|| PlannedTensor {
                name: part.name.clone(),
                dtype,
                dims: part.dims.clone(),
                parts: Vec::new(),
            });
            planned.parts.push(ExpertMatrix { expert, part });
        }
        tensors.into_values().collect()
    }

    pub(super) fn measure(&self, layer: usize, options: LoadOptions) -> Result<BlockBytes> {
        let config = self.block(layer)?;
        let experts = options.experts("Checkpoint::block_bytes", config.router.num_experts)?;
        let layout = self.layout(layer, config);
        let checked = self.check_block(&layout, false)?;
        let mut bytes = BlockBytes { experts: 0, replicated: 0, disk: 0 };
        for (kind, natural) in checked.natural.into_present() {
            let size = self.param_dtype(kind, natural, options.dtype).size();
            let count: usize = kind.dims(config, experts.len()).map_or(0, |dims| dims.iter().product());
            *(if kind.is_replicated() { &mut bytes.replicated } else { &mut bytes.experts }) += (count * size) as u64;
        }
        bytes.disk = checked.disk[0] / options.ranks as u64 + checked.disk[1];
        Ok(bytes)
    }
}
