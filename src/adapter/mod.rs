//! Code that the adapters of candle and burn share: a rank's group whose device is known at run time only, and the
//! collectives that an adapter runs itself.

mod collectives;
mod group;
#[cfg(feature = "burn")]
mod host_tensor;

pub(crate) use collectives::ParamCollective;
#[cfg(feature = "candle")]
pub(crate) use collectives::exchange;
pub use group::{AnyGroup, FrameworkDevice};
#[cfg(feature = "burn")]
pub(crate) use host_tensor::HostTensor;
