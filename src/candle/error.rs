//! Errors of this crate inside candle's, and the other way round.

use candle_core::Error as Theirs;

use crate::error::Error;

/// So that `?` serves inside functions of candle's `Result`. The message is ours, and [`error_of`] gives the error
/// back.
impl From<Error> for Theirs {
    fn from(error: Error) -> Self {
        // Whatever its name, the one variant that keeps an error as such and shows nothing else: `wrap` keeps its text.
        Theirs::Cuda(Box::new(error)).bt()
    }
}

/// This crate's error behind one of candle's, or behind whatever error wraps it as its source: to tell a rank that is
/// gone from a capacity that is too small.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use moebius::{Error, MoeConfig, candle};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let moe = candle::moe(MoeConfig::new(64, 32, 8, 2), vb)?;
/// let error = moe.forward(&Tensor::zeros((3, 65), DType::F32, &Device::Cpu)?).unwrap_err();
/// assert!(matches!(candle::error_of(&error), Some(Error::Invalid { .. })));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn error_of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Error> {
    let own = error.downcast_ref().or_else(|| error.downcast_ref().and_then(inside));
    own.or_else(|| error.source().and_then(error_of))
}

/// The same of candle's, whose wrappers name no source.
fn inside(error: &Theirs) -> Option<&Error> {
    match error {
        Theirs::Cuda(wrapped) | Theirs::WrappedContext { wrapped, .. } => error_of(&**wrapped),
        Theirs::Context { inner, .. } | Theirs::WithPath { inner, .. } | Theirs::WithBacktrace { inner, .. } => {
            inside(inner)
        }
        _ => None,
    }
}

/// A candle error as ours.
pub(super) fn framework(call: &'static str) -> impl Fn(Theirs) -> Error {
    move |e| reason_of(call, &e)
}

/// The same of one that is passed on, as other ranks are told of it.
pub(super) fn reason_of(call: &'static str, error: &Theirs) -> Error {
    match error_of(error) {
        Some(own) => own.clone(),
        None => Error::Framework { call, framework: "candle", message: refusal_reason(error) },
    }
}

/// An error as other ranks are told of it, by [`ExpertParallelMoE::refuse_forward`](super::ExpertParallelMoE::refuse_forward)
/// say: without the backtrace that `RUST_BACKTRACE` adds to its text, which is this rank's.
pub fn refusal_reason(error: &Theirs) -> String {
    match error {
        Theirs::WithBacktrace { inner, .. } => refusal_reason(inner),
        Theirs::Context { inner, context } => format!("{context}\n{}", refusal_reason(inner)),
        Theirs::WithPath { inner, path } => format!("path: {path:?} {}", refusal_reason(inner)),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Context, DType, Device, Module, Tensor};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;
    use crate::MoeConfig;
    use crate::candle::moe;

    fn ours() -> Error {
        Error::Capacity { rank: 1, layer: 2, needed: 9, capacity: 8 }
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
        let boxed: Box<dyn std::error::Error> = theirs().context("in layer 3").into();
        assert!(matches!(error_of(&*boxed), Some(Error::Capacity { needed: 9, .. })));
        assert!(matches!(error_of(&ours()), Some(Error::Capacity { needed: 9, .. })));
        assert!(error_of(&Theirs::msg(ours())).is_none());
        assert!(matches!(framework("test")(theirs()), Error::Capacity { .. }));
        assert!(matches!(framework("test")(Theirs::msg("other")), Error::Framework { .. }));
    }

    #[test]
    fn what_a_module_refuses_keeps_its_type() {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let moe = moe(MoeConfig::new(6, 4, 4, 2), vb).unwrap();
        let narrow = Tensor::zeros((3, 5), DType::F32, &Device::Cpu).unwrap();
        let error = moe.forward(&narrow).unwrap_err();
        assert!(matches!(error_of(&error), Some(Error::Shape { .. } | Error::Invalid { .. })), "{error}");
    }
}
