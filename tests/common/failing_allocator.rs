//! An allocator that has no memory when a test says so.
#![allow(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes of the zeroed memory that a request on this thread does not get; 0: it gets all.
    static REFUSED: Cell<usize> = const { Cell::new(0) };
    /// Sizes of the zeroed memory that this thread has asked for, and how many there are; no more than there is room for.
    static ASKED: Cell<([usize; MOST_ASKED], usize)> = const { Cell::new(([0; MOST_ASKED], MOST_ASKED)) };
}

const MOST_ASKED: usize = 512;

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
        let (mut sizes, count) = ASKED.get();
        if count < MOST_ASKED {
            sizes[count] = layout.size();
            ASKED.set((sizes, count + 1));
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

/// Sizes of the tensors that `work` asks for on this thread, in their order; all of them, or a panic.
pub fn zeroed_sizes(work: impl FnOnce()) -> Vec<usize> {
    ASKED.set(([0; MOST_ASKED], 0));
    work();
    let (sizes, count) = ASKED.replace(([0; MOST_ASKED], MOST_ASKED));
    assert!(count < MOST_ASKED, "more than {count} tensors");
    sizes[..count].to_vec()
}
