//! NCCL's C interface, as far as this crate calls it: types and numbers of its header, and a table of its functions
//! that is filled at run time ([`NcclLibrary`](crate::nccl::NcclLibrary)).
//!
//! Enums of C are integers here, so that a value that a newer library returns is only unknown.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;

use crate::nccl::NcclOptions;

/// `ncclComm_t` points to it.
#[repr(C)]
#[derive(Debug)]
pub struct RawComm {
    opaque: [u8; 0],
}

/// `ncclWindow_t` points to it.
#[repr(C)]
#[derive(Debug)]
pub struct RawWindow {
    opaque: [u8; 0],
}

/// `ncclComm_t`.
pub type CommPtr = *mut RawComm;
/// `ncclWindow_t`.
pub type WindowPtr = *mut RawWindow;
/// `cudaStream_t`, the same as the driver's `CUstream`.
pub type StreamPtr = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawUniqueId {
    /// Opaque.
    pub internal: [c_char; 128],
}

/// `ncclResult_t`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(pub c_int);

impl Status {
    /// Done, or enqueued.
    pub const SUCCESS: Self = Self(0);
    /// The caller handed over something that is not allowed there.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// A peer's process or network failed.
    pub const REMOTE_ERROR: Self = Self(6);
    /// A communicator that does not block has not finished yet.
    pub const IN_PROGRESS: Self = Self(7);
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ncclResult_t({})", self.0)
    }
}

/// `ncclDataType_t`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataType(pub c_int);

impl DataType {
    /// Bytes.
    pub const U8: Self = Self(1);
    /// 32-bit integers.
    pub const I32: Self = Self(2);
    /// 64-bit integers.
    pub const I64: Self = Self(4);
    /// binary16.
    pub const F16: Self = Self(6);
    /// binary32.
    pub const F32: Self = Self(7);
    /// binary64.
    pub const F64: Self = Self(8);
    /// bfloat16.
    pub const BF16: Self = Self(9);
}

/// `ncclRedOp_t`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedOp(pub c_int);

impl RedOp {
    /// Sum.
    pub const SUM: Self = Self(0);
    /// Maximum.
    pub const MAX: Self = Self(2);
}

/// `NCCL_CONFIG_UNDEF_INT`: the library's own choice.
pub const UNDEFINED: c_int = c_int::MIN;
/// `NCCL_SPLIT_NOCOLOR`: this rank takes part in a split and joins no part.
pub const NO_COLOR: c_int = -1;
/// `NCCL_WIN_COLL_SYMMETRIC`.
pub const WINDOW_SYMMETRIC: c_int = 1;

/// `ncclConfig_t` as of 2.28: its size and version tell a newer library which of its fields are there. Without what
/// came after 2.18 it says that it is as of 2.18, which every library takes.
#[repr(C)]
#[derive(Debug)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// 1: calls return when their work is enqueued.
    pub blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    /// 1: a part of a split shares its parent's resources.
    pub split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
}

impl Config {
    const MAGIC: c_uint = 0xcafe_beef;
    const VERSION: c_uint = 21800;
    const SIZE: usize = std::mem::offset_of!(Config, comm_name);
    /// From where on collectives over windows can be the copy engines'.
    const ENGINES_VERSION: c_uint = 22800;
    /// `NCCL_CTA_POLICY_ZERO`: no SM where copy engines can do it.
    const ENGINES: c_int = 2;

    /// Calls block until enqueued; everything else as the library chooses.
    pub fn blocking() -> Self {
        Self {
            size: Self::SIZE,
            magic: Self::MAGIC,
            version: Self::VERSION,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
        }
    }

    /// The same within the options; with `copy_engines`, collectives over windows are the copy engines' where they can
    /// be.
    pub fn of(copy_engines: bool, options: NcclOptions) -> Self {
        let (size, version, cta_policy) = (size_of::<Self>(), Self::ENGINES_VERSION, Self::ENGINES);
        let [min_ctas, max_ctas] = options.bounds().map(|ctas| ctas.unwrap_or(UNDEFINED));
        let plain = Self { min_ctas, max_ctas, ..Self::blocking() };
        match copy_engines {
            true => Self { size, version, cta_policy, ..plain },
            false => plain,
        }
    }
}

/// `ncclCommProperties_t` as of 2.30: what a communicator can do.
#[repr(C)]
#[derive(Debug)]
pub struct Properties {
    size: usize,
    magic: c_uint,
    version: c_uint,
    rank: c_int,
    ranks: c_int,
    cuda_device: c_int,
    nvml_device: c_int,
    /// 1: kernels of this crate can use windows of its ranks.
    pub device_api: u8,
    multimem: u8,
    gin_type: c_int,
    /// Sets of ranks whose GPUs load and store each other's memory; what an older library leaves is [`UNDEFINED`].
    pub load_store_teams: c_int,
    host_rma: u8,
    railed_gin_type: c_int,
}

impl Properties {
    /// From where on the last field is there.
    const RAILED: c_int = 23000;

    /// To be filled by a library of this version.
    pub fn of(version: c_int) -> Self {
        let size = match version {
            ..Self::RAILED => std::mem::offset_of!(Self, railed_gin_type),
            _ => size_of::<Self>(),
        };
        Self {
            size,
            magic: Config::MAGIC,
            version: version.cast_unsigned(),
            rank: 0,
            ranks: 0,
            cuda_device: 0,
            nvml_device: 0,
            device_api: 0,
            multimem: 0,
            gin_type: 0,
            load_store_teams: UNDEFINED,
            host_rma: 0,
            railed_gin_type: 0,
        }
    }
}

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct WaitSignal {
    /// Signals to wait for.
    pub count: c_int,
    /// From whom.
    pub peer: c_int,
    /// Number of the signal.
    pub index: c_int,
    /// Its context.
    pub context: c_int,
}

/// A struct of function pointers, and how it is filled from a library: fields before `optional` must be there.
macro_rules! functions {
    (
        required { $($(#[$doc:meta])* $name:ident: $symbol:literal = fn($($argument:ty),*) -> $result:ty;)+ }
        optional { $($(#[$odoc:meta])* $oname:ident: $osymbol:literal = fn($($oargument:ty),*) -> $oresult:ty;)+ }
    ) => {
        /// NCCL's functions. Those that a library of the oldest supported version may lack are options.
        #[derive(Debug, Clone, Copy)]
        pub struct Functions {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($argument),*) -> $result,)+
            $($(#[$odoc])* pub $oname: Option<unsafe extern "C" fn($($oargument),*) -> $oresult>,)+
        }

        impl Functions {
            /// Finds every function.
            ///
            /// # Safety
            /// The library is NCCL: its symbols have the types of its header.
            pub(in crate::nccl) unsafe fn find(library: &libloading::Library) -> std::result::Result<Self, &'static str> {
                // SAFETY: as the caller promises.
                unsafe {
                    Ok(Self {
                        $($name: *library.get($symbol.as_bytes()).map_err(|_| $symbol)?,)+
                        $($oname: library.get($osymbol.as_bytes()).ok().map(|f| *f),)+
                    })
                }
            }
        }
    };
}

functions! {
    required {
        /// Version as major · 10000 + minor · 100 + patch.
        get_version: "ncclGetVersion" = fn(*mut c_int) -> Status;
        /// Makes the id that the ranks of a communicator share.
        get_unique_id: "ncclGetUniqueId" = fn(*mut RawUniqueId) -> Status;
        /// Joins a communicator (collective).
        comm_init_rank_config: "ncclCommInitRankConfig" = fn(*mut CommPtr, c_int, RawUniqueId, c_int, *mut Config) -> Status;
        /// Divides a communicator (collective).
        comm_split: "ncclCommSplit" = fn(CommPtr, c_int, c_int, *mut CommPtr, *mut Config) -> Status;
        /// Frees a communicator whose work is done.
        comm_destroy: "ncclCommDestroy" = fn(CommPtr) -> Status;
        /// Ends what runs, and frees the communicator.
        comm_abort: "ncclCommAbort" = fn(CommPtr) -> Status;
        /// Asks for faults since the communicator was made, on the network for instance.
        comm_get_async_error: "ncclCommGetAsyncError" = fn(CommPtr, *mut Status) -> Status;
        /// Text of a status.
        get_error_string: "ncclGetErrorString" = fn(Status) -> *const c_char;
        /// Text of the last error.
        get_last_error: "ncclGetLastError" = fn(CommPtr) -> *const c_char;
        /// The following calls of this thread become one.
        group_start: "ncclGroupStart" = fn() -> Status;
        /// Starts them.
        group_end: "ncclGroupEnd" = fn() -> Status;
        /// Send, receive, count, type.
        all_gather: "ncclAllGather" = fn(*const c_void, *mut c_void, usize, DataType, CommPtr, StreamPtr) -> Status;
        /// Send, receive, count, type, operation.
        all_reduce: "ncclAllReduce" =
            fn(*const c_void, *mut c_void, usize, DataType, RedOp, CommPtr, StreamPtr) -> Status;
        /// Send, receive, count received, type, operation.
        reduce_scatter: "ncclReduceScatter" =
            fn(*const c_void, *mut c_void, usize, DataType, RedOp, CommPtr, StreamPtr) -> Status;
        /// Send, receive, count, type, root.
        broadcast: "ncclBroadcast" = fn(*const c_void, *mut c_void, usize, DataType, c_int, CommPtr, StreamPtr) -> Status;
        /// From, count, type, to whom.
        send: "ncclSend" = fn(*const c_void, usize, DataType, c_int, CommPtr, StreamPtr) -> Status;
        /// To, count, type, from whom.
        recv: "ncclRecv" = fn(*mut c_void, usize, DataType, c_int, CommPtr, StreamPtr) -> Status;
    }
    optional {
        /// Ends what runs, and keeps the communicator (2.29).
        comm_revoke: "ncclCommRevoke" = fn(CommPtr, c_int) -> Status;
        /// Memory that windows can be made of (2.19).
        mem_alloc: "ncclMemAlloc" = fn(*mut *mut c_void, usize) -> Status;
        /// Gives it back (2.19).
        mem_free: "ncclMemFree" = fn(*mut c_void) -> Status;
        /// Makes memory of all ranks a window (collective, 2.27).
        window_register: "ncclCommWindowRegister" = fn(CommPtr, *mut c_void, usize, *mut WindowPtr, c_int) -> Status;
        /// Ends a window (2.27).
        window_deregister: "ncclCommWindowDeregister" = fn(CommPtr, WindowPtr) -> Status;
        /// Address of a peer's part of a window, from an offset on; null where it is out of reach (2.29).
        get_peer_pointer: "ncclGetPeerDevicePointer" = fn(WindowPtr, usize, c_int, *mut *mut c_void) -> Status;
        /// What a communicator can do (2.29).
        query_properties: "ncclCommQueryProperties" = fn(CommPtr, *mut Properties) -> Status;
        /// Writes into a peer's window, and signals it (2.29).
        put_signal: "ncclPutSignal" =
            fn(*const c_void, usize, DataType, c_int, WindowPtr, usize, c_int, c_int, c_uint, CommPtr, StreamPtr) -> Status;
        /// Signals a peer (2.29).
        signal: "ncclSignal" = fn(c_int, c_int, c_int, c_uint, CommPtr, StreamPtr) -> Status;
        /// Waits for signals (2.29).
        wait_signal: "ncclWaitSignal" = fn(c_int, *mut WaitSignal, CommPtr, StreamPtr) -> Status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// The layout that the header's `ncclConfig_v21800` and its followers have on 64-bit systems.
    #[test]
    fn config_layout() {
        let of = |copy_engines| Config::of(copy_engines, NcclOptions::default());
        assert_eq!((of(false).size, of(false).version, of(false).cta_policy), (48, 21800, UNDEFINED));
        assert_eq!((of(true).size, of(true).version, of(true).cta_policy), (64, 22800, 2));
        let budget = |min_ctas, max_ctas| {
            let Config { min_ctas, max_ctas, size, .. } = Config::of(false, NcclOptions { min_ctas, max_ctas });
            (min_ctas, max_ctas, size)
        };
        assert_eq!(budget(0, 0), (UNDEFINED, UNDEFINED, 48));
        assert_eq!(budget(0, 8), (UNDEFINED, 8, 48));
        assert_eq!(budget(4, 8), (4, 8, 48));
        let offsets = [
            offset_of!(Config, magic),
            offset_of!(Config, version),
            offset_of!(Config, blocking),
            offset_of!(Config, max_ctas),
            offset_of!(Config, net_name),
            offset_of!(Config, split_share),
            offset_of!(Config, comm_name),
            offset_of!(Config, cta_policy),
        ];
        assert_eq!(offsets, [8, 12, 16, 28, 32, 40, 48, 60]);
        assert_eq!((size_of::<RawUniqueId>(), size_of::<WaitSignal>()), (128, 16));
    }

    /// The layout that the header of 2.30 has on 64-bit systems, and the size of the one before it.
    #[test]
    fn properties_layout() {
        let offsets = [
            offset_of!(Properties, version),
            offset_of!(Properties, rank),
            offset_of!(Properties, device_api),
            offset_of!(Properties, gin_type),
            offset_of!(Properties, load_store_teams),
            offset_of!(Properties, host_rma),
            offset_of!(Properties, railed_gin_type),
        ];
        assert_eq!(offsets, [12, 16, 32, 36, 40, 44, 48]);
        assert_eq!((Properties::of(23007).size, Properties::of(22903).size), (56, 48));
    }
}
