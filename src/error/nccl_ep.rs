//! Errors of NCCL EP itself.

/// NCCL EP is not there, is not usable for what was asked, or refused a call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclEpError {
    /// The library cannot be loaded, or lacks a function.
    #[error("NCCL EP: {path} ({source_of_path}) cannot be loaded: {message}")]
    Load {
        /// The file that was looked for.
        path: String,
        /// Who asked for it.
        source_of_path: &'static str,
        /// The loader's message.
        message: String,
    },
    /// The library is too old, or of another interface.
    #[error("NCCL EP: {path} is version {found}; 0.2.x is needed")]
    Version {
        /// The library.
        path: String,
        /// Its version.
        found: String,
    },
    /// NCCL is too old.
    #[error("NCCL EP: needs NCCL 2.30.4 or later, {path} is {found}; set MOEBIUS_NCCL to a newer one")]
    NcclVersion {
        /// NCCL's file.
        path: String,
        /// Its version.
        found: String,
    },
    /// A struct of the bindings has another size than the interface states: the bindings are wrong.
    #[error("NCCL EP: {name} has {found} bytes, the interface states {expected}")]
    StructSize {
        /// The struct.
        name: &'static str,
        /// Bytes stated.
        expected: usize,
        /// Bytes found.
        found: usize,
    },
    /// The GPU is too old.
    #[error("NCCL EP: needs a GPU of compute capability 9.0 or later, this one has {major}.{minor}")]
    Architecture {
        /// Major part.
        major: u32,
        /// Minor part.
        minor: u32,
    },
    /// A group of one rank.
    #[error("NCCL EP: needs 2 ranks or more, found {found}")]
    Ranks {
        /// Ranks of the communicator.
        found: usize,
    },
    /// The communicator is not NCCL's.
    #[error("NCCL EP: needs a communicator of NCCL on GPUs, found {found}")]
    Communicator {
        /// The value found instead.
        found: String,
    },
    /// The experts cannot be divided among the ranks.
    #[error("NCCL EP: num_experts: expected a multiple of the {ranks} ranks, found {experts}")]
    Experts {
        /// Experts asked for.
        experts: usize,
        /// Ranks.
        ranks: usize,
    },
    /// The rule of its transfers: experts of one NVLink domain come in fours.
    #[error(
        "NCCL EP: experts of one NVLink domain must be a multiple of 4, found {local} experts on each of {domain} ranks"
    )]
    Fours {
        /// Experts of a rank.
        local: usize,
        /// Ranks of the domain.
        domain: usize,
    },
    /// A row cannot be moved in 16-byte words.
    #[error("NCCL EP: {what}: expected a multiple of 16 bytes, found {bytes}; choose another dispatcher for such rows")]
    RowBytes {
        /// Which bytes.
        what: &'static str,
        /// How many.
        bytes: usize,
    },
    /// A row of numbers that its sums are not compiled for.
    #[error(
        "NCCL EP: rows of numbers: expected a multiple of 8 numbers, found {width}; choose another dispatcher for such \
         rows"
    )]
    Width {
        /// Numbers of a row.
        width: usize,
    },
    /// A row that the kernels for low latency are not compiled for.
    #[error(
        "NCCL EP, low latency: rows of {dtype}: expected a multiple of {lanes} numbers, found {width}; choose another \
         dispatcher for such rows"
    )]
    LowLatencyWidth {
        /// Numbers that a warp moves at once.
        lanes: usize,
        /// Their type.
        dtype: String,
        /// Numbers of a row.
        width: usize,
    },
    /// The call asks for something that low latency does not do.
    #[error("NCCL EP, low latency: {what}; choose another dispatcher for this layer")]
    LowLatency {
        /// The request.
        what: &'static str,
    },
    /// Ranks were late in a call of the dispatcher, and skipped, there and in every call since.
    #[error(
        "NCCL EP, low latency: rank {rank} skipped ranks {late:?}, which were late: what they hold is missing; make \
         the group anew"
    )]
    Late {
        /// This rank.
        rank: usize,
        /// The ranks that were late; none where the GPU no longer says.
        late: Vec<usize>,
    },
    /// Rows of a group with windows that lie in none.
    #[error("NCCL EP: {call}: rows: expected memory of a window, found other")]
    NoWindow {
        /// The call.
        call: &'static str,
    },
    /// More rows are kept than there are windows for.
    #[error(
        "NCCL EP: {call}: rows of an earlier call still lie in the window whose turn it is; set GroupConfig::windows \
         above {windows}, or give rows back sooner"
    )]
    Windows {
        /// The call.
        call: &'static str,
        /// Windows of that way.
        windows: usize,
    },
    /// Segments must begin at multiples of a power of two.
    #[error("NCCL EP: alignment: expected a power of two, found {found}")]
    Alignment {
        /// The requested value.
        found: usize,
    },
    /// A fixed capacity that the library does not take.
    #[error("NCCL EP: capacity: expected {expected}, found {found}")]
    Capacity {
        /// Values that are possible.
        expected: String,
        /// The requested value.
        found: usize,
    },
    /// Rows too long for what its kernels keep of them on chip; the library would end the process.
    #[error(
        "NCCL EP: {stages} stages of {bytes} bytes do not fit the {limit} bytes of shared memory; set \
         NCCL_EP_DISPATCH_NUM_STAGES and NCCL_EP_COMBINE_NUM_STAGES_G2S lower, or choose another dispatcher"
    )]
    SharedMemory {
        /// Rows in flight in a block.
        stages: usize,
        /// Bytes of a row.
        bytes: usize,
        /// Bytes that a block can have.
        limit: usize,
    },
    /// A number that the library does not take.
    #[error("NCCL EP: {call}: {name}: expected {expected}, found {found}")]
    Argument {
        /// The call.
        call: &'static str,
        /// The argument.
        name: &'static str,
        /// Values that are possible.
        expected: String,
        /// The requested value.
        found: String,
    },
    /// Its compiler, or headers for it, are missing.
    #[error(
        "NCCL EP compiles its kernels when they are first used, and finds no {what}. Looked at: {tried}. Set {variable}"
    )]
    Environment {
        /// The missing part.
        what: &'static str,
        /// Where it was looked for.
        tried: String,
        /// The variable that names it.
        variable: &'static str,
    },
    /// The folder for compiled kernels is not safe to run code from.
    #[error("NCCL EP: the folder for compiled kernels, {path}: {problem}; remove it or set NCCL_EP_JIT_CACHE_DIR")]
    Cache {
        /// The folder.
        path: String,
        /// The problem with it.
        problem: String,
    },
    /// A trial compilation failed; the library would end the process at its first call.
    #[error("NCCL EP: its kernels do not compile here ({status}):\n{command}\n{output}")]
    Compile {
        /// The compiler's end.
        status: String,
        /// The command.
        command: String,
        /// Output of the compiler.
        output: String,
    },
    /// A call failed.
    #[error("NCCL EP: {function}: {name} ({code})")]
    Call {
        /// The function.
        function: &'static str,
        /// Its status.
        code: i32,
        /// The status as text.
        name: &'static str,
    },
    /// A call threw an exception.
    #[error("NCCL EP: {function} threw: {message}")]
    Thrown {
        /// The function.
        function: &'static str,
        /// The library's message.
        message: String,
    },
    /// The communicator has ended before this call: a collective failed or was refused, a rank was lost, or it ran past its
    /// timeout, as this rank's first error over it says. Nothing that is built on it can be used: drop the group and its
    /// handles, join the ranks anew, and make another group.
    #[error(
        "NCCL EP: {call}: the communicator has ended, as an earlier error of this rank says why (a collective failed, was \
         refused or timed out, or a rank was lost): drop the group, join again and make another"
    )]
    Ended {
        /// The call.
        call: &'static str,
    },
}
