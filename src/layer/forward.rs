//! stub
use super::*;
pub(super) fn forward<D: Kernels>(
    _l: &Layer,
    _g: &mut Group<D>,
    _m: Mode,
    _x: TensorRef<'_, D>,
    _p: &Params<'_, D>,
) -> Result<Forward<D>> {
    todo!()
}
