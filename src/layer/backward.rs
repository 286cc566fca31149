//! stub
use super::*;
pub(super) fn backward<D: Kernels>(
    _l: &Layer,
    _g: &mut Group<D>,
    _c: Context<D>,
    _i: Inputs<'_, D>,
    _dy: Cotangents<'_, D>,
    _w: Wanted,
) -> Result<Gradients<D>> {
    todo!()
}
