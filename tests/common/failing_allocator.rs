//! An allocator that has no memory when a test says so.
#![allow(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes of the zeroed memory that the next request on this thread does not get; 0: it gets all.
    static REFUSED: Cell<usize> = const { Cell::new(0) };
}

/// The system's, but for the requests that [`without`] names.
struct FailingAllocator;

// SAFETY: every call is the system allocator's, with the caller's arguments, or gives null, which means that there is no
// memory; the cell allocates nothing.
unsafe impl GlobalAlloc for FailingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the system's demands.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if REFUSED.get() == layout.size() {
            REFUSED.set(0);
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above; `memory` is of `alloc` or `alloc_zeroed`, which are the system's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: FailingAllocator = FailingAllocator;

/// Runs `work` on this thread; the first tensor of so many bytes that it asks for is not to be had.
pub fn without<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    REFUSED.set(bytes);
    let result = work();
    assert_eq!(REFUSED.replace(0), 0, "no tensor of {bytes} bytes was asked for");
    result
}
