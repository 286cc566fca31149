//! The whole layer: route → prepare → dispatch → up → down → combine, and back. This is the seam that the
//! framework adapters call; the stages below it are its default implementation. Each stage is a `tracing` span at trace
//! level, named as in the picture (`route`, `prepare`, …, `dispatch_bwd`, `route_bwd`; `pack` and `unpack` where tokens
//! travel quantized).

mod aux_losses;
mod backward;
mod check;
mod context;
mod definition;
mod dispatch_combine;
mod early_up;
mod experts_bwd;
mod forward;
mod gradients;
mod memory;
mod mode;
mod outputs;
mod overlap;
mod param_kind;
mod params;
mod payload;
mod per_param;
mod refuse;
mod shared_expert;
mod spec;

pub use crate::aux_loss::AuxValue;
pub use crate::kernels::Scalar;
pub use aux_losses::AuxLoss;
#[cfg(any(feature = "candle", feature = "burn"))]
pub(crate) use context::BackwardProgress;
pub use context::Context;
pub use definition::{DispatchOptions, Layer};
pub use dispatch_combine::{
    DispatchContext, DispatchedRowGrads, DispatchedRowsMut, RoutedTokens, RoutingGrads, RoutingMut, TokenGradsMut,
};
pub use gradients::{Cotangents, GradientMask, GradientRequest, Gradients, GradientsMut};
pub use memory::{StepMemory, StepSizes};
pub use mode::{Mode, Noise};
pub use outputs::{Forward, ForwardInfo, Routing};
pub use param_kind::ParamKind;
pub use params::{Inputs, ParamViews, Params};
pub use per_param::PerParam;
#[cfg(any(feature = "candle", feature = "burn"))]
pub(crate) use refuse::RefusalGuard;
pub use spec::LayerSpec;
