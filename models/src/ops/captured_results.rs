//! Memory of a captured step's results: that of its first run, into which the captured one writes again.
//!
//! Every allocation and release in a capture is a node of the graph between two kernels, and the second of these then
//! starts only when the first has ended. Where results stay, kernels follow each other, and one starts while the one
//! before it ends ([`super::kernel_table`], `EARLY`).

use std::cell::RefCell;

use candle_core::{DType, Shape, Tensor};

/// Bytes that are kept at most: steps that make more have kernels that take longer than what lies between them.
const MOST_BYTES: usize = 64 << 20;

thread_local! {
    /// That of the step that runs on this thread: candle's operations take tensors, and have no room for it.
    static RUNNING: RefCell<Option<CapturedResults>> = const { RefCell::new(None) };
}

/// What the operations of a step have made, in their order.
#[derive(Debug, Default)]
pub(crate) struct CapturedResults {
    results: Vec<Tensor>,
    bytes: usize,
    /// Of `results`, the next that an operation gets; `None` in the first run.
    next: Option<usize>,
    /// Tensors of others that are released behind the step.
    late: Vec<Tensor>,
}

impl CapturedResults {
    /// Runs a step, the same each time. What the first run makes stays; later runs write it again, so nothing that a run
    /// has made may be read behind the next.
    pub(crate) fn run<R>(&mut self, step: impl FnOnce() -> R) -> R {
        struct Outer(Option<CapturedResults>);
        impl Drop for Outer {
            fn drop(&mut self) {
                RUNNING.set(self.0.take());
            }
        }
        let outer = Outer(RUNNING.replace(Some(std::mem::take(self))));
        let result = step();
        *self = RUNNING.take().unwrap_or_default();
        drop(outer);
        self.late.clear();
        self.next = Some(0);
        result
    }
}

/// What the first run of the step on this thread has made here, if this is a later one.
pub(super) fn made_before(shape: &Shape, dtype: DType) -> Option<Tensor> {
    RUNNING.with_borrow_mut(|running| {
        let CapturedResults { results, next: Some(next), .. } = running.as_mut()? else { return None };
        let found = results.get(*next).filter(|t| t.shape() == shape && t.dtype() == dtype)?;
        *next += 1;
        Some(found.clone())
    })
}

/// Keeps a result of the step that runs on this thread.
pub(super) fn keep(made: &Tensor) {
    RUNNING.with_borrow_mut(|running| {
        let Some(memory) = running.as_mut().filter(|memory| memory.next.is_none()) else { return };
        let bytes = made.elem_count() * made.dtype().size_in_bytes();
        // Behind one that is not kept none is, so that all have their places.
        if memory.bytes <= MOST_BYTES {
            memory.bytes += bytes;
            memory.results.push(made.clone());
        }
    });
}

/// Has a tensor of the step that runs on this thread, if one does, released behind it.
pub(crate) fn release_late(t: &Tensor) {
    RUNNING.with_borrow_mut(|running| running.iter_mut().for_each(|memory| memory.late.push(t.clone())));
}
