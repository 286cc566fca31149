use crate::config::*;
use crate::layer::AuxValue;
pub(crate) fn aux_value(_c: &RouterConfig, _a: &AuxConfig, _s: &[f64]) -> AuxValue {
    todo!()
}
