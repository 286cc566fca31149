//! Tiles, threads and shared memory that kernels were compiled with.

use super::params::{self, WARP_THREADS};

/// Constants that a family of kernels was compiled with.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileConfig {
    /// Rows and columns of a tile.
    pub(super) tile: usize,
    pub(super) threads: u32,
    pub(super) shared: u32,
}

/// Tiles of the mma kernels (`mma_sync` in `kernels/portable/gemm.cuh`).
pub(super) const MMA_SYNC: TileConfig = TileConfig {
    tile: params::MMA_SYNC_TILE as usize,
    threads: params::MMA_SYNC_THREADS,
    shared: params::MMA_SYNC_SMEM,
};
/// Tiles of the multiply-add kernels (`simt` there).
pub(super) const SIMT: TileConfig =
    TileConfig { tile: params::SIMT_TILE as usize, threads: params::SIMT_THREADS, shared: params::SIMT_SMEM };
/// Tiles of the tf32 kernels (`tf32` in `kernels/portable/linear_bwd_tf32.cuh`).
pub(super) const TF32: TileConfig =
    TileConfig { tile: params::TF32_TILE as usize, threads: params::TF32_THREADS, shared: params::TF32_SMEM };
/// Tile rows of the Hopper kernels over rows (`kernels/sm90/grouped_gemm_mainloop.cuh`).
pub(super) const SM90_GROUPED_GEMM: TileConfig = TileConfig {
    tile: params::GROUPED_GEMM_TILE as usize,
    threads: params::GROUPED_GEMM_THREADS,
    shared: params::GROUPED_GEMM_SMEM,
};
/// Rows of a tile of Hopper's products of few rows (`kernels/sm90_decode.cu`).
pub(super) const SM90_DECODE: TileConfig = TileConfig {
    tile: params::SM90_DECODE_ROWS as usize,
    threads: params::SM90_DECODE_WARPS * WARP_THREADS,
    shared: params::SM90_DECODE_SMEM,
};
/// Experts of a block of the router's logits there.
pub(super) const SM90_DECODE_LINEAR: TileConfig = TileConfig {
    tile: params::SM90_DECODE_LINEAR_COLUMNS as usize,
    threads: params::SM90_DECODE_LINEAR_WARPS * WARP_THREADS,
    shared: params::SM90_DECODE_LINEAR_SMEM,
};
/// Shared memory of the kernel that routes and plans (`kernels/sm90_route_plan.cu`) at most.
pub(super) const ROUTE_PLAN_SMEM: u32 = params::ROUTE_PLAN_SMEM;
/// Columns of a narrow operand that a block of the weight gradients' kernel takes (`kernels/sm90_wgrad.cu`).
pub(super) const SM90_WGRAD: TileConfig =
    TileConfig { tile: params::WGRAD_BLOCK_M as usize, threads: params::WGRAD_THREADS, shared: params::WGRAD_SMEM };
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
    TileConfig { tile: params::W4A16_BLOCK_M as usize, threads: params::W4A16_THREADS, shared: params::W4A16_SMEM };
/// Shared memory of the NVFP4 casts of aligned matrices, to nearest and stochastically
/// (`kernels/nvfp4_cast_aligned.cu`).
pub(super) const NVFP4_ALIGNED_SMEM: [u32; 2] = [params::NVFP4_ALIGNED_SMEM, params::NVFP4_ALIGNED_STOCHASTIC_SMEM];
/// Shared memory of the kernels that send sums over NVLink (`kernels/sm90_nvlink_combine.cu`).
pub(super) const NVLINK_SUM_SMEM: u32 = params::NVLINK_SUM_SMEM;
/// Most shared memory of the kernel that plans over NVLink (`kernels/sm90_nvlink_plan.cu`), beside its own variables.
pub(super) const NVLINK_PLAN_SMEM: u32 = 200 << 10;
/// Shared memory of the kernel that sends tokens by groups of experts (`kernels/sm90_nvlink_groups.cu`).
pub(super) const NVLINK_ITEMS_SMEM: u32 = params::NVLINK_ITEMS_SMEM;
/// Shared memory that a block has without asking for it, the kernel's own variables included.
pub(super) const DEFAULT_SMEM: u32 = 48 << 10;
/// Warps of the kernel that plans in one block (`plan_small` in `kernels/plan.cu`), and most shared memory of it:
/// counts of each warp, which fill what every block has, and the layout.
pub(super) const PLAN_SMALL_WARPS: usize = (params::PLAN_SEGMENTS_THREADS / WARP_THREADS) as usize;
pub(super) const PLAN_SMALL_SMEM: u32 =
    plan_small_shared(DEFAULT_SMEM as usize / 4 / PLAN_SMALL_WARPS, PLAN_SMALL_WARPS);

/// Bytes of shared memory that a plan of so many experts in one block of so many warps takes.
pub(super) const fn plan_small_shared(experts: usize, warps: usize) -> u32 {
    ((4 * experts + 2) * 8 + warps * experts * 4) as u32
}
