//! Gradients that leave a running backward, for somebody who asked for them before it began.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::Tensor;

use crate::error::Result;
use crate::layer::PerParam;

/// Receiver of gradients of layers as they are made.
pub(super) trait GradientHook {
    /// Takes some of the gradients of a layer's call, by parameter; candle is not to have these. Says which.
    fn on_gradients(
        &mut self,
        layer: u32,
        params: &PerParam<Option<Tensor>>,
        gradients: &mut PerParam<Option<Tensor>>,
    ) -> Result<PerParam<bool>>;
}

thread_local! {
    /// That of the backward that runs on this thread.
    static HOOK: RefCell<Option<Rc<RefCell<dyn GradientHook>>>> = const { RefCell::new(None) };
}

/// Runs a backward on this thread, whose layers' gradients `hook` may take.
pub(super) fn with_hook<T>(hook: Rc<RefCell<dyn GradientHook>>, work: impl FnOnce() -> T) -> T {
    struct Outer(Option<Rc<RefCell<dyn GradientHook>>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            HOOK.set(self.0.take());
        }
    }
    let _outer = Outer(HOOK.replace(Some(hook)));
    work()
}

/// Offers the gradients of a layer's call; says which of them have been taken.
pub(super) fn run_hook(
    layer: u32,
    params: &PerParam<Option<Tensor>>,
    gradients: &mut PerParam<Option<Tensor>>,
) -> Result<PerParam<bool>> {
    let hook = HOOK.with_borrow(Option::clone);
    match hook {
        Some(hook) => hook.borrow_mut().on_gradients(layer, params, gradients),
        None => Ok(PerParam::from_fn(|_| false)),
    }
}
