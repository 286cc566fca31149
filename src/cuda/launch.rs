//! Loaded kernels, and their launch.

use std::collections::HashMap;
use std::ffi::{CString, c_void};

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, DriverError, result};

use crate::error::{Error, Result};

use super::cubins::{self, CUBINS, Cubin, RELEASE};
use super::device::{Cuda, driver};
use super::sync::StuckFlag;

/// Tile of the mma kernels, and their shared memory (`mma_sync` in `kernels/portable/gemm.cuh`).
pub(super) const MMA_SYNC: TileConfig = TileConfig { tile: 128, threads: 256, shared: 81920 };
/// Tile of the multiply-add kernels, and their shared memory (`simt` there).
pub(super) const SIMT: TileConfig = TileConfig { tile: 64, threads: 256, shared: 17408 };

/// Tile of the tf32 kernels, and their shared memory (`tf32` in `kernels/portable/linear_bwd_tf32.cuh`).
pub(super) const TF32: TileConfig = TileConfig { tile: 128, threads: 256, shared: 87552 };

/// Tile rows of the Hopper kernels over rows, and their shared memory (`kernels/sm90/grouped_gemm_mainloop.cuh`).
pub(super) const SM90_GROUPED_GEMM: TileConfig = TileConfig { tile: 128, threads: 384, shared: 231_616 };
/// Columns of a narrow operand that a block of the weight gradients' kernel takes, and its shared memory
/// (`kernels/sm90_wgrad.cu`).
pub(super) const SM90_WGRAD: TileConfig = TileConfig { tile: 128, threads: 384, shared: 230_464 };
/// Most shared memory that the kernels of few rows with quantized weights take, which leaves room for another block; less
/// where a GPU lets no block have so much ([`Functions::decode_shared`]).
const DECODE_SHARED: u32 = 115_712;
/// Shared memory that a block has without asking for it, the kernel's own variables included.
pub(super) const DEFAULT_SMEM: u32 = 48 << 10;
/// Tiles of the router's products on Hopper (`kernels/sm90_linear.cu`): of tokens or experts, and shared memory.
pub(super) const SM90_LINEAR: TileConfig = TileConfig { tile: 64, threads: 160, shared: 99_424 };
/// The same of the tokens' gradient.
pub(super) const SM90_LINEAR_D_X: TileConfig = TileConfig { tile: 64, threads: 256, shared: 230_456 };
/// Weight rows of a tile of Hopper's kernels with quantized weights, and their shared memory (`kernels/sm90/w4a16_pipeline.cuh`).
pub(super) const SM90_W4A16: TileConfig = TileConfig { tile: 128, threads: 512, shared: 231_040 };
/// What the stages begin with that exist for sm_90a alone.
pub(super) const SM90_STAGES: &str = "sm90_";

/// Shared memory of the NVFP4 casts of aligned matrices, to nearest and stochastically (`kernels/nvfp4_cast_aligned.cu`).
pub(super) const NVFP4_ALIGNED_SMEM: [u32; 2] = [93_264, 74_832];

/// Constants that a family of kernels was compiled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileConfig {
    /// Rows and columns of a tile.
    pub(super) tile: usize,
    pub(super) threads: u32,
    pub(super) shared: u32,
}

/// Shared memory beside its own variables that a kernel asks for, on a GPU whose blocks may have `most`; 0: none.
fn reserved(stage: &str, name: &str, most: u32) -> u32 {
    match stage {
        "sm90_grouped_gemm" => SM90_GROUPED_GEMM.shared,
        "sm90_linear" if name == "sm90_linear_d_x" => SM90_LINEAR_D_X.shared,
        "sm90_linear" => SM90_LINEAR.shared,
        "sm90_wgrad" => SM90_WGRAD.shared,
        "sm90_w4a16" => SM90_W4A16.shared,
        "nvfp4_cast_aligned" => NVFP4_ALIGNED_SMEM[usize::from(name.contains("stochastic"))],
        "linear" if name.starts_with("linear_d_") && name.ends_with("f16") => TF32.shared,
        "w4a16_decode" => DECODE_SHARED.min(most),
        "grouped_gemm" | "linear" | "w4a16" | "wgrad" if name.ends_with("f16") => MMA_SYNC.shared,
        // Its counts may take all that there is, and it has variables too.
        "prepare" if name == "plan_small" => DEFAULT_SMEM,
        _ => 0,
    }
}

/// Why a cubin was not loaded: most often by a driver that is older than the nvcc.
fn not_loaded(stage: &str, arch: &str, error: DriverError) -> Error {
    let mut version = 0;
    // SAFETY: the result is written to a local.
    let _ = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    Error::Device {
        call: "Cuda::on",
        operation: format!("load kernels/{stage}.cu for sm_{arch}"),
        message: format!(
            "{error:?}; nvcc {RELEASE} has compiled it, and the driver is for CUDA {}.{}",
            version / 1000,
            version % 1000 / 10
        ),
    }
}

/// The kernels of one context, shared by its devices.
pub(super) struct Functions {
    pub(super) arch: &'static str,
    /// Shared memory that the kernels of few rows with quantized weights may take.
    pub(super) decode_shared: usize,
    /// A stream of these devices is stuck.
    pub(super) stuck: StuckFlag,
    table: HashMap<&'static str, sys::CUfunction>,
    modules: Vec<sys::CUmodule>,
}

impl Functions {
    /// Loads every stage into a context, which is the thread's.
    pub(super) fn load(context: &CudaContext) -> Result<Self> {
        const CALL: &str = "Cuda::on";
        const MOST: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let (major, minor) = context.compute_capability().map_err(driver(CALL, "ask for the compute capability"))?;
        let most = context.attribute(MOST).map_err(driver(CALL, "ask for the shared memory of a block"))? as u32;
        let arch = cubins::choose(CUBINS.iter().map(|c| c.arch), (major as u32, minor as u32))?;
        let decode_shared = reserved("w4a16_decode", "", most) as usize;
        let (table, modules) = (HashMap::new(), Vec::new());
        let mut loaded = Self { arch, decode_shared, stuck: StuckFlag::default(), table, modules };
        let sm90 = loaded.sm90();
        let serves = |c: &&Cubin| c.arch == arch && (sm90 || !c.stage.starts_with(SM90_STAGES));
        for Cubin { stage, kernels, image, .. } in CUBINS.iter().filter(serves) {
            // SAFETY: the image is a whole cubin, as nvcc wrote it.
            let module =
                unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(|e| not_loaded(stage, arch, e))?;
            loaded.modules.push(module);
            for name in *kernels {
                let text = CString::new(*name).map_err(|e| Error::invalid(CALL, "kernel", "a name", e))?;
                // SAFETY: the module was just loaded and is unloaded with `self` only.
                let function = unsafe { result::module::get_function(module, text) }
                    .map_err(driver(CALL, &format!("find kernel {name}")))?;
                loaded.table.insert(name, function);
                let shared = reserved(stage, name, most);
                if shared > 0 {
                    let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    // SAFETY: the function was just found.
                    unsafe { result::function::set_function_attribute(function, limit, shared as i32) }
                        .map_err(driver(CALL, &format!("reserve shared memory for kernel {name}")))?;
                }
            }
        }
        Ok(loaded)
    }

    /// Whether the kernels for Hopper are among them.
    pub(super) fn sm90(&self) -> bool {
        self.arch == "90a"
    }
}

// SAFETY: handles that the driver lets any thread use, unchanged after `load`.
unsafe impl Send for Functions {}
// SAFETY: as above.
unsafe impl Sync for Functions {}

impl Drop for Functions {
    fn drop(&mut self) {
        for module in &self.modules {
            // SAFETY: loaded once by `load`; the owner has waited for the stream. A context that is gone has unloaded
            // them itself, which the driver answers with an error.
            let _ = unsafe { result::module::unload(*module) };
        }
    }
}

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
    pub(super) unsafe fn launch<P>(&self, call: &'static str, kernel: &str, grid: Grid, params: &P) -> Result<()> {
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
        kernel: &str,
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
        let function = self.inner.functions.table.get(kernel).copied().ok_or_else(|| Error::Device {
            call,
            operation: format!("launch {kernel}"),
            message: "no such kernel".to_string(),
        })?;
        self.bind(call)?;
        // SAFETY: the function belongs to this context; its arguments are copied before the call returns; the rest is
        // the caller's promise.
        unsafe {
            result::launch_kernel(
                function,
                (x as u32, u32::from(y), 1),
                (grid.threads, 1, 1),
                grid.shared,
                self.inner.stream.cu_stream(),
                arguments,
            )
        }
        .map_err(driver(call, &format!("launch {kernel}")))
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::COUNTS;
    use super::*;

    /// Shared memory of a kernel's own variables: the size of a section of the cubin, a 64-bit ELF file. From 9.0 on it
    /// counts a kilobyte of the system's, which a block has beside its own.
    fn own_shared(Cubin { image, arch, .. }: &Cubin, kernel: &str) -> u32 {
        let system = if arch.starts_with('8') { 0 } else { 1024 };
        let word =
            |at: usize, bytes: usize| image[at..at + bytes].iter().rev().fold(0, |n, b| n << 8 | usize::from(*b));
        let section = |i: usize| word(0x28, 8) + i * word(0x3a, 2);
        let names = word(section(word(0x3e, 2)) + 24, 8);
        let wanted = format!(".nv.shared.{kernel}\0");
        let named = |at: &usize| image[names + word(*at, 4)..].starts_with(wanted.as_bytes());
        (0..word(0x3c, 2)).map(section).find(named).map_or(0, |at| (word(at + 32, 8) as u32).saturating_sub(system))
    }

    /// Kernels get the shared memory that they are launched with, on the GPU whose blocks may have least, too: 99 KB (8.6).
    #[test]
    fn shared_memory_is_there() {
        const LEAST: u32 = 99 << 10;
        for cubin in CUBINS.iter().filter(|c| !c.stage.starts_with(SM90_STAGES)) {
            let Cubin { stage, kernels, .. } = cubin;
            for kernel in *kernels {
                let (own, asked) = (own_shared(cubin, kernel), reserved(stage, kernel, LEAST));
                assert!(own + asked <= LEAST, "{kernel}: {own} + {asked}");
                let launched = match *kernel {
                    "plan_count"
                    | "plan_slots"
                    | "plan_small"
                    | "routing_records_count"
                    | "routing_records_slots"
                    | "all_to_all_places" => (4 * COUNTS) as u32,
                    "route" | "route_bwd" => DEFAULT_SMEM,
                    _ => 0,
                };
                assert!(
                    launched <= asked.max(DEFAULT_SMEM - own.min(DEFAULT_SMEM)),
                    "{kernel}: {launched} beside {own}"
                );
            }
        }
    }
}
