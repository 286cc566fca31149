//! Gradients that leave a running backward, for somebody who asked for them before it began.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::Tensor;

use crate::error::Result;
use crate::layer::PerParam;

/// Somebody who takes gradients of layers as they are made.
pub(super) trait LayerGradients {
    /// Takes some of the gradients of a layer's call, by parameter; candle is not to have these. Says which.
    fn take(
        &mut self,
        layer: u32,
        params: &PerParam<Option<Tensor>>,
        gradients: &mut PerParam<Option<Tensor>>,
    ) -> Result<PerParam<bool>>;
}

thread_local! {
    /// Who takes those of the backward that runs on this thread.
    static TAKER: RefCell<Option<Rc<RefCell<dyn LayerGradients>>>> = const { RefCell::new(None) };
}

/// Runs a backward on this thread, whose layers' gradients `taker` may take.
pub(super) fn during<T>(taker: Rc<RefCell<dyn LayerGradients>>, work: impl FnOnce() -> T) -> T {
    struct Outer(Option<Rc<RefCell<dyn LayerGradients>>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            TAKER.set(self.0.take());
        }
    }
    let _outer = Outer(TAKER.replace(Some(taker)));
    work()
}

/// Offers the gradients of a layer's call; says which of them have been taken.
pub(super) fn offer(
    layer: u32,
    params: &PerParam<Option<Tensor>>,
    gradients: &mut PerParam<Option<Tensor>>,
) -> Result<PerParam<bool>> {
    let taker = TAKER.with_borrow(Option::clone);
    match taker {
        Some(taker) => taker.borrow_mut().take(layer, params, gradients),
        None => Ok(PerParam::from_fn(|_| false)),
    }
}
