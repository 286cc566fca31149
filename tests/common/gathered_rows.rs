//! Rows of a small tensor, repeated on the GPU: for tensors that the host would take long to make.

use moebius::cuda::Cuda;
use moebius::kernels::{GatherRows, Kernels, Origin};
use moebius::{Result, Tensor};

/// `[map, width]`, rows of `source [rows, width]` by number; zeros where negative.
pub fn gathered_rows(cuda: &Cuda, source: &Tensor<Cuda>, map: Vec<i32>) -> Result<Tensor<Cuda>> {
    let dims = [map.len(), source.dims()[1]];
    let map = Tensor::from_vec(map, &dims[..1])?.to(cuda)?;
    let mut out = Tensor::empty(cuda, source.dtype(), &dims)?;
    cuda.gather_rows(GatherRows {
        source: source.view(),
        map: map.view(),
        origin: Origin::default(),
        out: out.view_mut(),
    })?;
    Ok(out)
}
