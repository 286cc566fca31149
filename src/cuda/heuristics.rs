//! Numbers that were measured or weighed, and that nothing else determines: where one kernel takes over from another,
//! and how work is cut. None changes what is computed but where its documentation says so. What kernels are compiled
//! with stands in `kernels/common/shapes.h`; notes are in `kernels/notes/`.

// ------------------------------------------------------------------------------------------------ experts' products

/// Columns of gate (and as many of up), or of a gradient through the activation, from which mapped rows are brought
/// into slot order before Hopper's product: each is then read so often that TMA, which follows no map, makes up for it.
/// Measured on an H100 at the sizes of `benches/cuda`: `notes/grouped_gemm.md`.
pub(super) const ORDER_ROWS_COLUMNS: usize = 8192;

/// The same of the wide side of a weight gradient: `notes/wgrad.md`.
pub(super) const ORDER_WGRAD_COLUMNS: usize = 8192;

/// Length of a sum from which down and the rows' gradient are made in wider tiles: what follows the sum, which these do
/// not hide, is then a small part. `notes/grouped_gemm.md`.
pub(super) const WIDE_SUM: usize = 8192;

/// Length of a sum below which the gradient through the activation may be made in square tiles, of which a warpgroup has
/// registers left for its long epilogue: where they make an eighth fewer columns than tiles of 192 would, or where L2 is
/// small. The rows' dots, from which the weights' gradients are made, are then sums of other parts. `notes/grouped_gemm.md`.
pub(super) const SQUARE_SUM: usize = 4096;

/// Bytes below which L2 is small: an H100 has 50 MB, an H200 60.
pub(super) const SMALL_L2: usize = 55 << 20;

/// Tokens up to which Hopper's kernel for few rows makes the router's logits: sums are the same either way.
/// `notes/router.md`.
pub(super) const DECODE_LINEAR_ROWS: usize = 64;

/// A weight gradient that runs during the way back of rows (`nvlink_combine`) makes those of so many experts, over the
/// rows of the gradient and the SMs of the other kernel, of all: as many as take it as long. What is left then has all
/// SMs. Both times are as the rows' number and width. `notes/nvlink.md`.
pub(super) const WGRAD_UNDER_RETURN: usize = 28_000;

// ------------------------------------------------------------------------------------------------ quantized weights

/// Rows of an expert, on average, up to which the kernels for few rows serve. They sum in another order than those for
/// many rows, so results change there. `notes/w4a16.md`.
pub(super) const DECODE_ROWS: i64 = 32;

/// Rows of an expert, on average, up to which tiles of 8 rows serve: of 4-bit weights with more blocks an SM instead of
/// one of eight warps (`notes/w4a16.md`), of 16-bit weights in place of tiles of 128 rows, to the same bits
/// (`notes/decode.md`). A plan lists its layout's tiles for the products that this chooses.
const DECODE_EIGHT_ROWS: i64 = 6;

/// Blocks up to which those of tiles of 8 rows take a quarter of the weight rows each, and two warps share these, each with
/// half of k: two for each of an H100's 132 SMs, whose warps else wait for their own instructions. `notes/w4a16.md`.
pub(super) const DECODE_NARROW_BLOCKS: usize = 264;

/// Whether so many rows of so many experts are few.
pub(super) fn few_rows(rows: i64, experts: i64) -> bool {
    rows <= DECODE_EIGHT_ROWS.saturating_mul(experts)
}

/// Most shared memory that they take, which leaves room for another block of an SM of 227 KiB; less where a GPU lets no
/// block have so much. `notes/w4a16.md`.
pub(super) const DECODE_SHARED: u32 = 115_712;

/// Rows of an expert, on average, above which fp8 blocks are de-quantized for Hopper's dense forward kernels. These sum in
/// another order than the portable ones, so results change there. Weighed, not measured: the portable kernels multiply
/// whole tiles of 128 rows; and where FP4 weights change their kernel, too. `notes/w4a16.md`.
pub(super) const DEQUANTIZE_ROWS: i64 = 32;

/// Bytes of 16-bit weights of several experts that products have at a time which de-quantize them first: each chunk of
/// experts ends with SMs that wait for the last tiles, half a tile's time in the mean, so that few chunks are better;
/// qwen3-30b-a3b's down is one of 384 MiB, its up two. Measured on an H100: its rows' gradients take 1.43 of bf16's time
/// with 64 MiB, 1.27 with 256, 1.24 with this and with 4 GiB. `notes/w4a16.md`.
pub(super) const WEIGHT_SCRATCH: usize = 512 << 20;

// ----------------------------------------------------------------------------------------------- the router's products

/// Blocks that a sum over tokens is cut into at least, as far as there are tokens: two for each of an H100's 132 SMs,
/// and a number of its own, so that results do not depend on the GPU's size. Another number changes the order of the
/// sum. `notes/router.md`.
pub(super) const SPLIT_BLOCKS: usize = 264;

/// Fewest tokens of a part of such a sum. Changes the order of the sum. `notes/router.md`.
pub(super) const SPLIT_TOKENS: usize = 256;

/// Hidden elements of a part of a logit, where there are at least [`SPLIT_PARTS`]: few tokens make few blocks. The cut
/// does not depend on the number of tokens, so a token's logits do not either. Changes the order of the sum.
/// `notes/router.md`.
pub(super) const SPLIT_HIDDEN: usize = 1024;

/// Fewest parts of a logit.
pub(super) const SPLIT_PARTS: usize = 4;

/// Blocks of one warp that route where a token's working rows do not fit shared memory: two an SM of an H100, which
/// bounds the scratch.
pub(super) const ROUTER_SCRATCH_BLOCKS: usize = 264;

// ------------------------------------------------------------------------------------------------ plans

/// Chunks that choices are cut into at most, one a warp; a chunk is a multiple of a warp. `notes/plan.md`.
pub(super) const PLAN_CHUNKS: usize = 1024;

/// Choices that one block plans alone, of at most twice as many rows: a launch less than it takes by several.
/// `notes/plan.md`.
pub(super) const PLAN_SMALL: usize = 8192;

/// Entries of maps that a block clears where there are many. Weighed, not measured.
pub(super) const PLAN_CLEARED: usize = 2048;

/// Most blocks that write a record. Weighed, not measured.
pub(super) const RECORD_BLOCKS: usize = 256;

// ------------------------------------------------------------------------------------------------ moving and adding

/// Most blocks of a loop over a whole tensor: some fifteen an SM of an H100. Weighed, not measured.
pub(super) const LOOP_BLOCKS: usize = 2048;

/// Blocks an SM has at the same time when ranks' shares are added: as many as fit.
pub(super) const ADD_SHARES_BLOCKS: usize = 8;

/// Blocks an SM is given when numbers that are not finite are looked for. Weighed, not measured.
pub(super) const FINITE_BLOCKS: usize = 16;

/// Rows that combine over NVLink sends ahead of the tokens that it sums. `notes/nvlink.md`.
#[cfg(feature = "nccl")]
pub(super) const NVLINK_LAG: usize = 512;

/// Blocks of the exchange of records at most, and bytes for each of them. `notes/nvlink.md`.
#[cfg(feature = "nccl")]
pub(super) const NVLINK_EXCHANGE_BLOCKS: usize = 16;
#[cfg(feature = "nccl")]
pub(super) const NVLINK_EXCHANGE_BYTES: usize = 16 << 10;

/// Choices that a block of the plan over NVLink takes at least, where there are so many. `notes/nvlink.md`.
#[cfg(feature = "nccl")]
pub(super) const NVLINK_PLAN_CHOICES: usize = 512;

/// Most blocks of that plan, an SM each. They start together or not at all, and wait for peers: where they took all SMs, a
/// plan on one rank and a collective of another stream on another would each keep the other's counterpart from starting,
/// for good. Half of the smallest Hopper's SMs leave room for both. `notes/nvlink.md`.
#[cfg(feature = "nccl")]
pub(super) const NVLINK_PLAN_BLOCKS: usize = 64;

/// Nanoseconds at most that some blocks and warps of kernels over NVLink idle on a device of tests.
#[cfg(feature = "nccl")]
pub(super) const NVLINK_TEST_DELAY: i64 = 20_000;

// ------------------------------------------------------------------------------------------------ memory

/// Every block of memory has at least this size and is a multiple of it, so that no tensor has a null pointer, which
/// kernels read as "none". Weighed, not measured.
pub(super) const BLOCK_BYTES: usize = 512;

/// A free block serves a request that it exceeds by at most one part in so many. Weighed, not measured.
pub(super) const BLOCK_SLACK: usize = 8;

/// Bytes of a block up to which a graph takes more at once, and how many: a decode step's tensors are smaller, and a layer
/// gives the framework two. `notes/decode.md`.
pub(super) const AHEAD_BYTES: usize = 64 << 10;
pub(super) const AHEAD_BLOCKS: usize = 15;

// ------------------------------------------------------------------------------------------------ dispatchers

/// Most tokens of a rank that are few: all-gather is within 3 % of the quickest then, in graphs, on up to [`GPUS_OF_HOST`]
/// ranks. `docs/benchmarks-gpus.md`.
pub(super) const ALL_GATHER_TOKENS: usize = 512;

/// Most tokens of a rank with which low latency was timed. `docs/benchmarks-gpus.md`.
pub(super) const LOW_LATENCY_TOKENS: usize = 128;

/// Largest static capacity with which a group replays steps of few tokens, whatever else it has room for: as many rows as two
/// ranks have of [`ALL_GATHER_TOKENS`] with eight choices each. `docs/benchmarks-gpus.md`.
pub(super) const FEW_STATIC_ROWS: usize = 2 * ALL_GATHER_TOKENS * 8;

/// GPUs of a host, between which a row that nobody asked for costs least.
pub(super) const GPUS_OF_HOST: usize = 8;
