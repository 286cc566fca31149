//! Memory of burn's CUDA back end that the core fills.

use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::tensor::CubeTensor;

use crate::dtype::DType;

/// A tensor in memory of burn's pool that this crate fills.
#[derive(Debug)]
pub struct CudaOutput {
    pub(super) tensor: CubeTensor<CudaRuntime>,
    pub(super) ptr: u64,
    pub(super) dtype: DType,
    pub(super) dims: Vec<usize>,
}
