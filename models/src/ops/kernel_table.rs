//! All kernels of `kernels/`, each a field: what a launch takes is found when the PTX is loaded into a GPU's context, so a
//! name that is wrong fails there and not at a launch.
//!
//! A table is made by a function that finds one kernel; that of a GPU asks the driver, and tests collect the names.

use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, result, sys};
use candle_core::{DType, Error, Result};

use super::cuda::{Grid, int};
use super::params;

/// One stage, compiled for every GPU from a capability on.
struct Ptx {
    stage: &'static str,
    /// `80`, or `90`.
    arch: &'static str,
    /// Names of its kernels.
    kernels: &'static [&'static str],
    text: &'static str,
}

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// That of capability 9.0 and later, whose kernels are started while the one before them runs, and wait themselves
/// (`wait_for_previous_kernel` in `kernels/common.cuh`).
const EARLY: &str = "90";

/// A kernel to be found.
#[derive(Debug)]
struct KernelSpec {
    /// The file in `kernels/` that has it.
    stage: &'static str,
    name: String,
    /// Bytes of shared memory that it is to be allowed beside its own variables; 0: what every kernel has.
    shared: usize,
}

/// Heads that attention's forward and backward have kernels for.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionHeads {
    /// Entries of a query and key, and of a value.
    pub dim: usize,
    pub value: usize,
    /// Queries of a block of the forward.
    pub rows: usize,
    /// Of the backward's kernels that a block of keys, and a block of queries, is the work of.
    pub keys: BackwardBlock,
    pub queries: BackwardBlock,
}

/// A block of a backward's kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct BackwardBlock {
    /// Its keys or queries.
    pub rows: usize,
    /// Queries or keys of a step.
    pub step: usize,
    /// Blocks of threads that have it together: gradients of keys and of values are made apart where these are 2.
    pub blocks: usize,
}

impl AttentionHeads {
    /// In the order of [`KernelTable::attention_forward`].
    pub const ALL: [Self; 4] = [
        Self { dim: 64, value: 64, rows: 128, keys: block(128, 32), queries: block(128, 64) },
        Self { dim: 128, value: 128, rows: 128, keys: block(64, 64), queries: block(128, 32) },
        Self { dim: 192, value: 128, rows: 64, keys: block(64, 32), queries: block(64, 32) },
        Self {
            dim: 256,
            value: 256,
            rows: 64,
            keys: BackwardBlock { blocks: 2, ..block(64, 16) },
            queries: block(64, 16),
        },
    ];

    /// Bytes of shared memory: tiles of queries, keys and values.
    pub fn shared(self) -> usize {
        (self.rows * self.dim + params::ATTENTION_KEYS as usize * (self.dim + self.value)) * size_of::<u16>()
    }

    /// Of the backward's kernels: two tiles of a block, and of two steps.
    fn backward_shared(self, block: BackwardBlock) -> usize {
        (block.rows + 2 * block.step) * (self.dim + self.value) * size_of::<u16>()
    }

    /// Those of keys have two numbers of each query of two steps beside.
    pub fn keys_shared(self) -> usize {
        self.backward_shared(self.keys) + 2 * 2 * self.keys.step * size_of::<f32>()
    }

    pub fn queries_shared(self) -> usize {
        self.backward_shared(self.queries)
    }
}

const fn block(rows: usize, step: usize) -> BackwardBlock {
    BackwardBlock { rows, step, blocks: 1 }
}

/// Entries of values that the backward's products of rows have kernels for, in the order of
/// [`KernelTable::attention_dots`].
pub(super) const DOTS_VALUES: [usize; 3] = [64, 128, 256];

/// Entries of heads that a decode step's attention has kernels for, in the order of [`KernelTable::cache_attention`].
pub(super) const CACHE_DIMS: [usize; 3] = [64, 128, 256];

/// Bytes of shared memory of a decode step's attention: keys and values of a step, of two steps where they fit, and the
/// queries.
pub(super) fn cache_attention_shared(dim: usize) -> usize {
    let steps = if dim == 256 { 1 } else { 2 };
    (steps * 2 * params::CACHE_STEP as usize + params::CACHE_HEADS as usize) * dim * size_of::<u16>()
}

/// Something for each 16-bit type.
#[derive(Debug)]
pub(super) struct PerType<K> {
    bf16: K,
    f16: K,
}

impl<K> PerType<K> {
    fn new(mut find: impl FnMut(&str) -> Result<K>) -> Result<Self> {
        Ok(Self { bf16: find("bf16")?, f16: find("f16")? })
    }

    /// That of a type.
    ///
    /// # Errors
    /// A type without kernels.
    pub fn of(&self, dtype: DType) -> Result<&K> {
        match dtype {
            DType::BF16 => Ok(&self.bf16),
            DType::F16 => Ok(&self.f16),
            other => Err(Error::msg(format!("kernels: expected bf16 or f16, found {other:?}"))),
        }
    }
}

/// Something for each type that rows have.
#[derive(Debug)]
pub(super) struct PerFloat<K> {
    half: PerType<K>,
    f32: K,
}

impl<K> PerFloat<K> {
    fn new(mut find: impl FnMut(&str) -> Result<K>) -> Result<Self> {
        Ok(Self { f32: find("f32")?, half: PerType::new(find)? })
    }

    /// That of a type.
    ///
    /// # Errors
    /// A type without kernels.
    pub fn of(&self, dtype: DType) -> Result<&K> {
        if dtype == DType::F32 { Ok(&self.f32) } else { self.half.of(dtype) }
    }
}

/// Longest row that a warp has.
const WARP_ROW: usize = 1024;

/// Longest row that a block of fewer threads has. More threads wait longer for each other, and have nothing to do in a row of
/// 2048, eight entries each.
const SMALL_BLOCK_ROW: usize = 4096;

/// A stage's kernels of rows, by who has a row (`kernels/rows.cuh`).
#[derive(Debug)]
pub(super) struct RowKernels<K> {
    warp: K,
    /// Blocks of [`params::SMALL_ROW_THREADS`].
    small_block: K,
    /// Blocks of [`params::ROW_THREADS`].
    block: K,
}

impl<K> RowKernels<K> {
    /// That of rows of this size, and its grid; with shared memory for a row in f32 each where rows are kept.
    pub fn of(&self, rows: usize, size: usize, kept: bool) -> (&K, Grid) {
        let (kernel, of_block, threads) = if size <= WARP_ROW {
            (&self.warp, params::WARPS as usize, params::THREADS)
        } else if size <= SMALL_BLOCK_ROW {
            (&self.small_block, 1, params::SMALL_ROW_THREADS)
        } else {
            (&self.block, 1, params::ROW_THREADS)
        };
        let shared = if kept { of_block * size * size_of::<f32>() } else { 0 };
        (kernel, Grid { blocks: [rows.div_ceil(of_block), 1, 1], threads: threads as usize, shared })
    }
}

/// All of them.
#[derive(Debug)]
pub(super) struct KernelTable<K> {
    pub argmax: PerType<K>,
    pub attention_forward: PerType<Vec<K>>,
    pub attention_dots: PerType<Vec<K>>,
    /// In the order of [`AttentionHeads::ALL`], as the next.
    pub attention_backward_keys: PerType<Vec<K>>,
    pub attention_backward_queries: PerType<Vec<K>>,
    /// For one row of x, for two, and so on.
    pub gemv: PerType<Vec<K>>,
    pub norm: PerFloat<RowKernels<K>>,
    pub norm_backward: PerFloat<RowKernels<K>>,
    pub norm_weight_sums: PerFloat<K>,
    pub qk_norm_rope: K,
    pub softmax: PerFloat<RowKernels<K>>,
    pub softmax_backward: PerFloat<RowKernels<K>>,
    pub cache_attention: Vec<K>,
    pub cache_combine: K,
}

impl<K> KernelTable<K> {
    /// # Errors
    /// The first that `find` returns.
    fn new(mut find: impl FnMut(KernelSpec) -> Result<K>) -> Result<Self> {
        let mut asking = |stage, name: String, shared| find(KernelSpec { stage, name, shared });
        let mut by_heads = |stage, kernel: &str, shared: fn(AttentionHeads) -> usize| {
            PerType::new(|t| {
                let named = |heads: AttentionHeads| format!("{kernel}_{t}_{}_{}", heads.dim, heads.value);
                AttentionHeads::ALL.into_iter().map(|heads| asking(stage, named(heads), shared(heads))).collect()
            })
        };
        let attention_forward = by_heads("attention", "attention_forward", AttentionHeads::shared)?;
        let stage = "attention_backward";
        let attention_backward_keys = by_heads(stage, "attention_backward_keys", AttentionHeads::keys_shared)?;
        let attention_backward_queries = by_heads(stage, "attention_backward_queries", AttentionHeads::queries_shared)?;
        let mut rows = |stage, kernel: &str| {
            PerFloat::new(|t| {
                let mut of = |group: i32| asking(stage, format!("{kernel}_{t}_{group}"), 0);
                Ok(RowKernels {
                    warp: of(32)?,
                    small_block: of(params::SMALL_ROW_THREADS)?,
                    block: of(params::ROW_THREADS)?,
                })
            })
        };
        let [norm, norm_backward] = [rows("norm", "norm")?, rows("norm_backward", "norm_backward")?];
        let [softmax, softmax_backward] = [rows("softmax", "softmax")?, rows("softmax", "softmax_backward")?];
        Ok(Self {
            argmax: PerType::new(|t| asking("argmax", format!("argmax_{t}"), 0))?,
            attention_forward,
            attention_dots: PerType::new(|t| {
                let named = |value: usize| format!("attention_dots_{t}_{value}");
                DOTS_VALUES.into_iter().map(|value| asking("attention_backward", named(value), 0)).collect()
            })?,
            attention_backward_keys,
            attention_backward_queries,
            gemv: PerType::new(|t| {
                (1..=params::GEMV_MOST_ROWS).map(|rows| asking("gemv", format!("gemv_{t}_{rows}"), 0)).collect()
            })?,
            norm,
            norm_backward,
            norm_weight_sums: PerFloat::new(|t| asking("norm_backward", format!("norm_weight_sums_{t}"), 0))?,
            softmax,
            softmax_backward,
            qk_norm_rope: asking("qk_norm_rope", "qk_norm_rope".to_string(), 0)?,
            cache_attention: CACHE_DIMS
                .into_iter()
                .map(|dim| asking("cache_attention", format!("cache_attention_{dim}"), cache_attention_shared(dim)))
                .collect::<Result<_>>()?,
            cache_combine: asking("cache_attention", "cache_combine".to_string(), 0)?,
        })
    }
}

/// A kernel of a context.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    pub name: &'static str,
    pub function: sys::CUfunction,
    /// It waits itself for the kernel before it.
    pub early: bool,
}

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Tables of the contexts that have been asked for, by the driver's number of a context, which no later context gets.
/// Modules are never unloaded: they end with their context.
static LOADED: Mutex<Vec<(u64, Arc<KernelTable<Kernel>>)>> = Mutex::new(Vec::new());

/// The kernels of a context, loaded by the first call.
///
/// # Errors
/// A kernel that is missing; the driver's.
pub(super) fn kernels(context: &CudaContext) -> Result<Arc<KernelTable<Kernel>>> {
    let mut number = 0;
    // SAFETY: the context is there, and the number is written to a local.
    unsafe { sys::cuCtxGetId(context.cu_ctx(), &raw mut number) }.result().w()?;
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, table)) = loaded.iter().find(|(of, _)| *of == number) {
        return Ok(Arc::clone(table));
    }
    let table = Arc::new(load(context)?);
    loaded.push((number, Arc::clone(&table)));
    Ok(table)
}

/// Loads every stage into a context, and finds all kernels in them.
fn load(context: &CudaContext) -> Result<KernelTable<Kernel>> {
    context.bind_to_thread().w()?;
    let (major, _) = context.compute_capability().w()?;
    let arch = if major >= 9 { EARLY } else { "80" };
    let mut modules = Vec::new();
    let table = load_modules(arch, &mut modules).and_then(|()| KernelTable::new(|wanted| find(&modules, &wanted)));
    if table.is_err() {
        for (_, module) in modules {
            // SAFETY: loaded above, and nothing of it is used.
            let _ = unsafe { result::module::unload(module) };
        }
    }
    table
}

type Modules = Vec<(&'static Ptx, sys::CUmodule)>;

fn load_modules(arch: &str, modules: &mut Modules) -> Result<()> {
    for ptx in PTX.iter().filter(|ptx| ptx.arch == arch) {
        let text = CString::new(ptx.text).map_err(Error::wrap)?;
        // SAFETY: the text ends with a zero, and the driver copies it.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
        modules.push((ptx, module.map_err(|e| Error::msg(format!("kernels/{}.cu: {e}", ptx.stage)))?));
    }
    Ok(())
}

fn find(modules: &Modules, wanted: &KernelSpec) -> Result<Kernel> {
    let KernelSpec { stage, name, shared } = wanted;
    let missing = || Error::msg(format!("kernels/{stage}.cu has no kernel {name}"));
    let of = |(ptx, module): &(&'static Ptx, sys::CUmodule)| {
        let name = ptx.kernels.iter().find(|held| ptx.stage == *stage && **held == name.as_str())?;
        Some((*name, *module, ptx.arch == EARLY))
    };
    let (name, module, early) = modules.iter().find_map(of).ok_or_else(missing)?;
    let text = CString::new(name).map_err(|_| missing())?;
    // SAFETY: the module is loaded.
    let function = unsafe { result::module::get_function(module, text) }.map_err(|_| missing())?;
    if *shared > 0 {
        let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function was just found.
        unsafe { result::function::set_function_attribute(function, most, int(*shared)?) }.w()?;
    }
    Ok(Kernel { name, function, early })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Both ways: a name that no PTX has would fail when it is loaded, a kernel that nobody names is dead.
    #[test]
    fn the_ptx_holds_what_the_table_names_and_nothing_else() -> Result<()> {
        let mut named = Vec::new();
        KernelTable::new(|wanted| {
            named.push((wanted.stage, wanted.name));
            Ok(())
        })?;
        let once: BTreeSet<_> = named.iter().cloned().collect();
        assert_eq!(named.len(), once.len(), "a kernel is named twice");
        for arch in ["80", EARLY] {
            let of_arch = PTX.iter().filter(|ptx| ptx.arch == arch);
            let held = of_arch.flat_map(|ptx| ptx.kernels.iter().map(|name| (ptx.stage, name.to_string())));
            assert_eq!(held.collect::<BTreeSet<_>>(), once, "{arch}");
        }
        Ok(())
    }

    /// Of the PTX whose kernels are started early each begins so; one that does not would read what is not there yet.
    #[test]
    fn early_kernels_wait_themselves() {
        for ptx in PTX.iter().filter(|ptx| ptx.arch == EARLY) {
            for body in ptx.text.split(".entry ").skip(1) {
                let name = body.split('(').next().unwrap_or_default();
                let wait = body.find("griddepcontrol.wait");
                let first = ["ld.global", "st.global", "cp.async", "bra"].iter().filter_map(|i| body.find(i)).min();
                assert!(wait.is_some_and(|wait| first.is_none_or(|first| wait < first)), "{name}");
            }
        }
    }

    #[test]
    fn a_kernel_that_is_missing_is_named_with_its_file() {
        static GEMV: Ptx = Ptx { stage: "gemv", arch: "80", kernels: &["gemv_bf16_1"], text: "" };
        let modules = vec![(&GEMV, std::ptr::null_mut())];
        for (stage, name) in [("gemv", "gemv_bf16_5"), ("argmax", "gemv_bf16_1")] {
            let error = find(&modules, &KernelSpec { stage, name: name.to_string(), shared: 0 });
            let text = error.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(text.contains(&format!("kernels/{stage}.cu has no kernel {name}")), "{text}");
        }
    }

    /// On the GPU whose blocks may have least, too: 99 KB (8.6), of which no kernel's own variables take one.
    #[test]
    fn shared_memory_is_there() -> Result<()> {
        const LEAST: usize = 99 << 10;
        KernelTable::new(|wanted| {
            assert!(wanted.shared <= LEAST - (1 << 10), "{wanted:?}");
            Ok(())
        })?;
        Ok(())
    }
}
