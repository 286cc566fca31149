// Sizes that host and kernels share: tiles, threads and shared memory of a block, and how much it takes on.
// Kernels assert that theirs are these; src/cuda/bindings.rs has them for the host (`cargo run -p xtask -- params`).
#pragma once
#include <stdint.h>

// Portable products: on tensor cores (`mma_sync` in portable/gemm.cuh), multiply-add (`simt` there), tf32
// (portable/linear_bwd_tf32.cuh). Tiles are square.
constexpr uint32_t MMA_SYNC_TILE = 128, MMA_SYNC_THREADS = 256, MMA_SYNC_SMEM = 81920;
constexpr uint32_t SIMT_TILE = 64, SIMT_THREADS = 256, SIMT_SMEM = 17408;
constexpr uint32_t TF32_TILE = 128, TF32_THREADS = 256, TF32_SMEM = 87552;

// Hopper's products over rows (sm90/grouped_gemm_mainloop.cuh): rows of a tile; columns of weights, of gate and up
// together, of others, and of the wider tiles of long sums.
constexpr uint32_t GROUPED_GEMM_TILE = 128, GROUPED_GEMM_THREADS = 384, GROUPED_GEMM_SMEM = 231616;
constexpr uint32_t GROUPED_GEMM_UP_COLUMNS = 256, GROUPED_GEMM_COLUMNS = 192, GROUPED_GEMM_WIDE_COLUMNS = 256;

// Hopper's products of few rows (sm90_decode.cu): warps of a block, rows of a tile, weight rows of a block.
constexpr uint32_t SM90_DECODE_WARPS = 2, SM90_DECODE_ROWS = 8, SM90_DECODE_COLUMNS = 32, SM90_DECODE_SMEM = 49152;
// Of the router's logits a block is a warp, with a longer ring.
constexpr uint32_t SM90_DECODE_LINEAR_SMEM = 98304;

// Hopper's weight gradients (sm90_wgrad.cu): columns of a tile of the narrower and of the wider side.
constexpr uint32_t WGRAD_BLOCK_M = 128, WGRAD_BLOCK_N = 256, WGRAD_THREADS = 384, WGRAD_SMEM = 230464;

// The router's products on Hopper (sm90_linear.cu): tokens or experts of a tile, columns of a tile of the weight's
// gradient; of the tokens' gradient also the columns of the weight that a block keeps and the most experts.
constexpr uint32_t SM90_LINEAR_TILE = 64, SM90_LINEAR_THREADS = 160, SM90_LINEAR_SMEM = 99424;
constexpr uint32_t SM90_LINEAR_DW_COLUMNS = 128;
constexpr uint32_t SM90_LINEAR_DX_TILE = 64, SM90_LINEAR_DX_THREADS = 256, SM90_LINEAR_DX_SMEM = 230456;
constexpr uint32_t SM90_LINEAR_DX_COLUMNS = 512, SM90_LINEAR_DX_EXPERTS = 128;

// Hopper's products of many rows with 4-bit weights (sm90/w4a16_pipeline.cuh): weight rows and rows of a tile.
constexpr uint32_t W4A16_BLOCK_M = 128, W4A16_BLOCK_N = 256, W4A16_THREADS = 512, W4A16_SMEM = 231040;
// Those of few rows (w4a16_decode.cu): columns of a weight in a step, those of a thread of a quad, weight rows of a
// warp.
constexpr uint32_t DECODE_STEP = 256, DECODE_THREAD_STEP = 64, DECODE_WARP_COLUMNS = 32;

// Casts to NVFP4: shared memory without and with columns (nvfp4_cast.cu), of whole panels to nearest and stochastically
// (nvfp4_cast_aligned.cu), and rows and columns that a block of these takes.
constexpr uint32_t NVFP4_CAST_SMEM = 35072, NVFP4_CAST_COLUMNS_SMEM = 46336;
constexpr uint32_t NVFP4_ALIGNED_SMEM = 93264, NVFP4_ALIGNED_STOCHASTIC_SMEM = 74832;
constexpr uint32_t NVFP4_ALIGNED_ROWS = 256, NVFP4_ALIGNED_COLUMNS = 512;
// Rows of a panel of any cast, and bytes of one (quant/quantize.cuh).
constexpr uint32_t PANEL_ROWS = 128, PANEL_BYTES = 256;

// Bytes of a matrix whose amax a block takes (quant_amax.cu); eights of elements that a block brings back to floating
// point (dequantize.cu).
constexpr uint32_t AMAX_SPAN = 1 << 17, DEQUANTIZE_SPAN = 2048;

// The router (router.cu): rows of E words that a warp works on; experts of which a warp holds a token's scores in
// registers. Tokens that auxiliary sums take at a time, and threads of the block that adds them up (aux_loss.cu).
constexpr uint32_t ROUTER_WORK_ROWS = 6, ROUTER_REGISTER_EXPERTS = 256, AUX_CHUNK = 64, AUX_TOTAL_THREADS = 256;
