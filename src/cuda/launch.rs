//! Loaded kernels, and their launch.

use std::ffi::{CString, c_void};

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, DriverError, result};

use crate::error::{Error, Result};

use super::cubins::{self, CUBINS, Cubin, RELEASE, arch_is_hopper};
use super::device::{Cuda, driver};
use super::kernel_table::{KernelSpec, Table, Traits};
use super::sync::StuckFlag;
use super::{heuristics, params};

/// Tiles of the mma kernels (`mma_sync` in `kernels/portable/gemm.cuh`).
pub(super) const MMA_SYNC: TileConfig =
    TileConfig { tile: params::TENSOR_TILE as usize, threads: params::TENSOR_THREADS, shared: params::TENSOR_SMEM };
/// Tiles of the multiply-add kernels (`simt` there).
pub(super) const SIMT: TileConfig =
    TileConfig { tile: params::SCALAR_TILE as usize, threads: params::SCALAR_THREADS, shared: params::SCALAR_SMEM };
/// Tiles of the tf32 kernels (`tf32` in `kernels/portable/linear_bwd_tf32.cuh`).
pub(super) const TF32: TileConfig =
    TileConfig { tile: params::TF32_TILE as usize, threads: params::TF32_THREADS, shared: params::TF32_SMEM };
/// Tile rows of the Hopper kernels over rows (`kernels/sm90/grouped_gemm_mainloop.cuh`).
pub(super) const SM90_GROUPED_GEMM: TileConfig = TileConfig {
    tile: params::GROUPED_GEMM_TILE as usize,
    threads: params::GROUPED_GEMM_THREADS,
    shared: params::GROUPED_GEMM_SMEM,
};
/// Columns of a narrow operand that a block of the weight gradients' kernel takes (`kernels/sm90_wgrad.cu`).
pub(super) const SM90_WGRAD: TileConfig =
    TileConfig { tile: params::WGRAD_NARROW as usize, threads: params::WGRAD_THREADS, shared: params::WGRAD_SMEM };
/// Tokens or experts of a tile of the router's products on Hopper (`kernels/sm90_linear.cu`).
pub(super) const SM90_LINEAR: TileConfig = TileConfig {
    tile: params::SM90_LINEAR_TILE as usize,
    threads: params::SM90_LINEAR_THREADS,
    shared: params::SM90_LINEAR_SMEM,
};
/// The same of the tokens' gradient.
pub(super) const SM90_LINEAR_D_X: TileConfig = TileConfig {
    tile: params::SM90_LINEAR_DX_TILE as usize,
    threads: params::SM90_LINEAR_DX_THREADS,
    shared: params::SM90_LINEAR_DX_SMEM,
};
/// Weight rows of a tile of Hopper's kernels with quantized weights (`kernels/sm90/w4a16_pipeline.cuh`).
pub(super) const SM90_W4A16: TileConfig =
    TileConfig { tile: params::W4A16_WEIGHTS as usize, threads: params::W4A16_THREADS, shared: params::W4A16_SMEM };
/// Shared memory of the NVFP4 casts of aligned matrices, to nearest and stochastically
/// (`kernels/nvfp4_cast_aligned.cu`).
pub(super) const NVFP4_ALIGNED_SMEM: [u32; 2] = [params::NVFP4_ALIGNED_SMEM, params::NVFP4_ALIGNED_STOCHASTIC_SMEM];
/// Shared memory that a block has without asking for it, the kernel's own variables included.
pub(super) const DEFAULT_SMEM: u32 = 48 << 10;
/// Prefix of the names of stages that exist for sm_90a alone.
#[cfg(test)]
pub(super) const SM90_STAGES: &str = "sm90_";

/// Constants that a family of kernels was compiled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileConfig {
    /// Rows and columns of a tile.
    pub(super) tile: usize,
    pub(super) threads: u32,
    pub(super) shared: u32,
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

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    pub(super) name: &'static str,
    function: sys::CUfunction,
}

/// The kernels of one context, shared by its devices.
pub(super) struct ContextKernels {
    pub(super) arch: &'static str,
    /// Shared memory that the kernels of few rows with quantized weights may take.
    pub(super) decode_shared: usize,
    /// A stream of these devices is stuck.
    pub(super) stuck: StuckFlag,
    pub(super) table: Table<Kernel>,
    /// Held until the table is gone.
    _modules: Modules,
}

/// Modules of a context, unloaded when dropped.
#[derive(Default)]
struct Modules(Vec<(&'static Cubin, sys::CUmodule)>);

impl Modules {
    /// The module whose cubin has a kernel.
    ///
    /// # Errors
    /// [`Error::MissingKernel`].
    fn of(&self, arch: &'static str, wanted: KernelSpec) -> Result<sys::CUmodule> {
        let with = |(cubin, _): &&(&Cubin, _)| cubin.stage == wanted.stage && cubin.kernels.contains(&wanted.name);
        self.0.iter().find(with).map(|(_, module)| *module).ok_or_else(|| missing(arch, wanted))
    }
}

fn missing(arch: &str, KernelSpec { stage, name, .. }: KernelSpec) -> Error {
    Error::MissingKernel { kernel: name, cubin: format!("kernels/{stage}.cu for sm_{arch}") }
}

impl ContextKernels {
    /// Loads every stage into a context, which is the thread's, and finds all kernels in them.
    ///
    /// # Errors
    /// [`Error::MissingKernel`]; a driver's error.
    pub(super) fn load(context: &CudaContext) -> Result<Self> {
        const CALL: &str = "Cuda::on";
        const MOST: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let (major, minor) = context.compute_capability().map_err(driver(CALL, "ask for the compute capability"))?;
        let most = context.attribute(MOST).map_err(driver(CALL, "ask for the shared memory of a block"))? as u32;
        let arch = cubins::choose(CUBINS.iter().map(|c| c.arch), (major as u32, minor as u32))?;
        let mut modules = Modules::default();
        // Stages for another architecture have no kernels.
        for cubin in CUBINS.iter().filter(|c| c.arch == arch && !c.kernels.is_empty()) {
            // SAFETY: the image is a whole cubin, as nvcc wrote it.
            let module = unsafe { result::module::load_data(cubin.image.as_ptr().cast()) }
                .map_err(|e| not_loaded(cubin.stage, arch, e))?;
            modules.0.push((cubin, module));
        }
        let traits = Traits { sm90: arch_is_hopper(arch), decode_shared: heuristics::DECODE_SHARED.min(most) };
        let table = Table::new(traits, |wanted| {
            let KernelSpec { name, shared, .. } = wanted;
            let module = modules.of(arch, wanted)?;
            let text = CString::new(name).map_err(|_| missing(arch, wanted))?;
            // SAFETY: the module was loaded above and is unloaded behind the table only.
            let function = unsafe { result::module::get_function(module, text) }.map_err(|_| missing(arch, wanted))?;
            if shared > 0 {
                let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function was just found.
                unsafe { result::function::set_function_attribute(function, limit, shared as i32) }
                    .map_err(driver(CALL, &format!("reserve shared memory for kernel {name}")))?;
            }
            Ok(Kernel { name, function })
        })?;
        let decode_shared = traits.decode_shared as usize;
        Ok(Self { arch, decode_shared, stuck: StuckFlag::default(), table, _modules: modules })
    }
}

// SAFETY: handles that the driver lets any thread use, unchanged after `load`.
unsafe impl Send for ContextKernels {}
// SAFETY: as above.
unsafe impl Sync for ContextKernels {}

impl Drop for Modules {
    fn drop(&mut self) {
        for (_, module) in &self.0 {
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

    #[test]
    fn a_kernel_that_is_missing_is_named_with_its_cubin() {
        let wanted = KernelSpec { stage: "prepare", name: "plan_smal", shared: 0 };
        let error = Modules::default().of("90a", wanted).err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(error, "Cuda::on: kernels/prepare.cu for sm_90a has no kernel plan_smal");
        static CUBIN: Cubin = Cubin { stage: "prepare", arch: "90a", kernels: &["plan_small"], image: &[] };
        let modules = std::mem::ManuallyDrop::new(Modules(vec![(&CUBIN, std::ptr::null_mut())]));
        assert!(modules.of("90a", wanted).is_err());
        assert!(modules.of("90a", KernelSpec { name: "plan_small", ..wanted }).is_ok());
        assert!(modules.of("90a", KernelSpec { name: "plan_small", stage: "records", ..wanted }).is_err());
    }

    /// Kernels get the shared memory that they are launched with, on the GPU whose blocks may have least, too: 99 KB
    /// (8.6).
    #[test]
    fn shared_memory_is_there() {
        const LEAST: u32 = 99 << 10;
        let mut reserved = std::collections::BTreeMap::new();
        let traits = Traits { sm90: false, decode_shared: heuristics::DECODE_SHARED.min(LEAST) };
        let table = Table::new(traits, |wanted| {
            reserved.insert(wanted.name, wanted.shared);
            Ok(())
        });
        assert!(table.is_ok());
        for cubin in CUBINS.iter().filter(|c| !c.stage.starts_with(SM90_STAGES)) {
            for kernel in cubin.kernels {
                let (own, asked) = (own_shared(cubin, kernel), reserved[kernel]);
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
