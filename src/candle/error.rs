//! Errors of this crate inside candle's, and the other way round.

use candle_core::Error as Theirs;

use crate::error::Error;

/// So that `?` serves inside functions of candle's `Result`. The message is ours, and [`error_of`] gives the error back.
impl From<Error> for Theirs {
    fn from(error: Error) -> Self {
        // Whatever its name, the one variant that keeps an error as such and shows nothing else: `wrap` keeps its text.
        Theirs::Cuda(Box::new(error)).bt()
    }
}

/// This crate's error behind one of candle's, to tell a rank that is gone from a capacity that is too small.
pub fn error_of(error: &Theirs) -> Option<&Error> {
    match error {
        Theirs::Cuda(own) => own.downcast_ref(),
        Theirs::WrappedContext { wrapped, .. } => {
            wrapped.downcast_ref().or_else(|| wrapped.downcast_ref().and_then(error_of))
        }
        Theirs::Context { inner, .. } | Theirs::WithPath { inner, .. } | Theirs::WithBacktrace { inner, .. } => {
            error_of(inner)
        }
        _ => None,
    }
}

/// A candle error as ours.
pub(super) fn framework(call: &'static str) -> impl Fn(Theirs) -> Error {
    move |e| match error_of(&e) {
        Some(own) => own.clone(),
        None => Error::Framework { call, framework: "candle", message: e.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Context, DType, Device, Module, Tensor};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;
    use crate::candle::{EpGroup, ExpertParallelMoE};
    use crate::ep::GroupConfig;
    use crate::{MoeConfig, layer::Layer};

    fn ours() -> Error {
        Error::Capacity { rank: 1, needed: 9, capacity: 8 }
    }

    #[test]
    fn an_error_of_ours_is_found_behind_candles() {
        let is_ours = |e: &Theirs| matches!(error_of(e), Some(Error::Capacity { needed: 9, .. }));
        let theirs = || Theirs::from(ours());
        assert!(theirs().to_string().starts_with(&ours().to_string()));
        assert!(is_ours(&theirs()));
        assert!(is_ours(&theirs().with_path("model").context("in layer 3")));
        assert!(is_ours(&Err::<(), _>(theirs()).context("in layer 3").unwrap_err()));
        assert!(is_ours(&Err::<(), _>(ours()).context("in layer 3").unwrap_err()));
        assert!(error_of(&Theirs::msg(ours())).is_none());
        assert!(matches!(framework("test")(theirs()), Error::Capacity { .. }));
        assert!(matches!(framework("test")(Theirs::msg("other")), Error::Framework { .. }));
    }

    #[test]
    fn what_a_module_refuses_keeps_its_type() {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let group = EpGroup::single(GroupConfig::new(4, 8)).unwrap();
        let moe = ExpertParallelMoE::new(Layer::new(MoeConfig::new(6, 4, 4, 2), 0).unwrap(), group, vb).unwrap();
        let narrow = Tensor::zeros((3, 5), DType::F32, &Device::Cpu).unwrap();
        let error = moe.forward(&narrow).unwrap_err();
        assert!(matches!(error_of(&error), Some(Error::Shape { .. } | Error::Invalid { .. })), "{error}");
        let many = Tensor::zeros((9, 6), DType::F32, &Device::Cpu).unwrap();
        let error = moe.forward(&many).unwrap_err();
        assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
    }
}
