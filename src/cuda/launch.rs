//! Launches of kernels.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;

use crate::error::{Error, Result};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::driver::driver;
use super::kernel_table::BlockStart;
use super::params::WARP_THREADS;

/// Blocks and threads of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: (usize, usize),
    pub(super) threads: u32,
    pub(super) shared: u32,
    /// It may start before the kernel that was enqueued last has ended, once all blocks of that one let it.
    pub(super) programmatic: bool,
    /// Blocks form clusters of two.
    pub(super) pairs: bool,
}

impl Grid {
    /// So many blocks of so many threads.
    pub(super) fn new(blocks: usize, threads: u32) -> Self {
        Self { blocks: (blocks, 1), threads, shared: 0, programmatic: false, pairs: false }
    }

    /// Blocks of so many threads, one of which takes an item.
    pub(super) fn threads_of(items: usize, threads: u32) -> Self {
        Self::new(items.div_ceil(threads as usize), threads)
    }

    /// Blocks of so many threads, a warp of which takes an item.
    pub(super) fn warps_of(items: usize, threads: u32) -> Self {
        Self::new(items.div_ceil((threads / WARP_THREADS) as usize), threads)
    }
}

/// Threads of a block for so many items, a thread an item: whole warps, one at least and `most` threads at most.
pub(super) fn whole_warps(items: usize, most: u32) -> u32 {
    let warp = WARP_THREADS as usize;
    items.next_multiple_of(warp).clamp(warp, most as usize) as u32
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
        let mut attributes = attributes(kernel.start, &grid);
        let config = sys::CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: u32::from(y),
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.inner.stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: the function belongs to this context; configuration and arguments are copied before the call returns;
        // a kernel that is started early waits itself for what it reads; the rest is the caller's promise.
        unsafe { sys::cuLaunchKernelEx(&raw const config, kernel.function, arguments.as_mut_ptr(), ptr::null_mut()) }
            .result()
            .map_err(driver(call, &format!("launch {}", kernel.name)))
    }
}

/// What a launch is to be told of when and where its blocks start.
fn attributes(start: BlockStart, grid: &Grid) -> Vec<sys::CUlaunchAttribute> {
    use sys::CUlaunchAttributeID::{
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER, CU_LAUNCH_ATTRIBUTE_COOPERATIVE as COOPERATIVE,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as PROGRAMMATIC,
    };
    let dependent = (PROGRAMMATIC, sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 });
    let start = match start {
        BlockStart::Plain => grid.programmatic.then_some(dependent),
        BlockStart::Programmatic => Some(dependent),
        BlockStart::Cooperative => Some((COOPERATIVE, sys::CUlaunchAttributeValue { cooperative: 1 })),
    };
    let pair = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 2, y: 1, z: 1 };
    let pairs = grid.pairs.then_some((CLUSTER, sys::CUlaunchAttributeValue { clusterDim: pair }));
    let of = |(id, value)| sys::CUlaunchAttribute { id, pad: [0; 4], value };
    start.into_iter().chain(pairs).map(of).collect()
}
