//! Launches of kernels.

use std::ffi::c_void;

use cudarc::driver::result;

use crate::error::{Error, Result};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::driver::driver;

/// Blocks and threads of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: (usize, usize),
    pub(super) threads: u32,
    pub(super) shared: u32,
}

impl Grid {
    /// So many blocks of so many threads.
    pub(super) fn new(blocks: usize, threads: u32) -> Self {
        Self { blocks: (blocks, 1), threads, shared: 0 }
    }
}

/// A kernel's parameter, as the driver takes it.
pub(super) fn argument<P>(parameter: &P) -> *mut c_void {
    (&raw const *parameter).cast_mut().cast()
}

impl Cuda {
    /// Enqueues a kernel of one parameter. Nothing is launched for no blocks.
    ///
    /// # Safety
    /// `params` is the struct that the kernel takes, and its pointers are valid for what the kernel does with them.
    pub(super) unsafe fn launch<P>(&self, call: &'static str, kernel: &Kernel, grid: Grid, params: &P) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.launch_with(call, kernel, grid, &mut [argument(params)]) }
    }

    /// Enqueues a kernel. Nothing is launched for no blocks.
    ///
    /// # Safety
    /// `arguments` point to the kernel's parameters, in order, and pointers among these are valid for what it does.
    pub(super) unsafe fn launch_with(
        &self,
        call: &'static str,
        kernel: &Kernel,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let (x, y) = grid.blocks;
        if x == 0 || y == 0 {
            return Ok(());
        }
        let (Ok(x), Ok(y)) = (i32::try_from(x), u16::try_from(y)) else {
            return Err(Error::invalid(
                call,
                "size",
                "a grid of at most 2^31 - 1 by 65535 blocks",
                format!("{x} x {y}"),
            ));
        };
        self.bind(call)?;
        // SAFETY: the function belongs to this context; its arguments are copied before the call returns; the rest is
        // the caller's promise.
        unsafe {
            result::launch_kernel(
                kernel.function,
                (x as u32, u32::from(y), 1),
                (grid.threads, 1, 1),
                grid.shared,
                self.inner.stream.cu_stream(),
                arguments,
            )
        }
        .map_err(driver(call, &format!("launch {}", kernel.name)))
    }
}
