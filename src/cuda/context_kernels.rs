//! The kernels of a context: its modules, and all functions in them.

use std::ffi::CString;

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, DriverError, result};

use crate::error::{Error, Result};

use super::cubins::{self, CUBINS, Cubin, RELEASE, arch_is_hopper};
use super::driver::driver;
use super::failure::StuckFlag;
use super::heuristics;
use super::kernel_table::{BlockStart, KernelSpec, Table, Traits};

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
    pub(super) function: sys::CUfunction,
    pub(super) start: BlockStart,
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
            Ok(Kernel { name, function, start: wanted.start(major >= 9) })
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

#[cfg(test)]
mod tests {
    use super::super::cubins::SM90_STAGES;
    use super::super::plan::COUNTS;
    use super::super::tile_config::{DEFAULT_SMEM, PLAN_SMALL_SMEM};
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
        let wanted = KernelSpec { stage: "plan", name: "plan_smal", shared: 0 };
        let error = Modules::default().of("90a", wanted).err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(error, "Cuda::on: kernels/plan.cu for sm_90a has no kernel plan_smal");
        static CUBIN: Cubin = Cubin { stage: "plan", arch: "90a", kernels: &["plan_small"], image: &[] };
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
                    | "routing_records_count"
                    | "routing_records_slots"
                    | "all_to_all_places" => (4 * COUNTS) as u32,
                    "plan_small" => PLAN_SMALL_SMEM,
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
