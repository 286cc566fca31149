// Sizes that host and kernels share: tiles, threads and shared memory of a block, and how much it takes on.
// Kernels assert that theirs are these; src/cuda/bindings.rs has them for the host (`cargo run -p xtask -- params`).
#pragma once
#include <stdint.h>

// Threads of a warp, and so of a block of one.
constexpr uint32_t WARP_THREADS = 32;

// Portable products: on tensor cores (`mma_sync` in portable/gemm.cuh), multiply-add (`simt` there), tf32
// (portable/linear_bwd_tf32.cuh). Tiles are square.
constexpr uint32_t MMA_SYNC_TILE = 128, MMA_SYNC_THREADS = 256, MMA_SYNC_SMEM = 81920;
constexpr uint32_t SIMT_TILE = 64, SIMT_THREADS = 256, SIMT_SMEM = 17408;
constexpr uint32_t TF32_TILE = 128, TF32_THREADS = 256, TF32_SMEM = 87552;

// Hopper's products over rows (sm90/grouped_gemm_mainloop.cuh): rows of a tile; columns of weights, of gate and up
// together, of others, of the wider tiles of long sums, and of the square ones of short sums with a long epilogue.
constexpr uint32_t GROUPED_GEMM_TILE = 128, GROUPED_GEMM_THREADS = 384, GROUPED_GEMM_SMEM = 231616;
constexpr uint32_t GROUPED_GEMM_UP_COLUMNS = 256, GROUPED_GEMM_COLUMNS = 192, GROUPED_GEMM_WIDE_COLUMNS = 256, GROUPED_GEMM_SQUARE_COLUMNS = 128;
// Rows of a box that leaves an epilogue, of 64 columns; of one that comes to or leaves down's gradient's.
constexpr uint32_t GROUPED_GEMM_BOX_ROWS = 16, GROUPED_GEMM_BWD_BOX_ROWS = 8;

// Hopper's products of few rows (sm90_decode.cu): warps of a block, rows of a tile, weight rows of a block.
constexpr uint32_t SM90_DECODE_WARPS = 2, SM90_DECODE_ROWS = 8, SM90_DECODE_COLUMNS = 32, SM90_DECODE_SMEM = 49152;
// Of the router's logits a block is a warp of 16 experts, with a longer ring.
constexpr uint32_t SM90_DECODE_LINEAR_WARPS = 1, SM90_DECODE_LINEAR_COLUMNS = 16, SM90_DECODE_LINEAR_SMEM = 98304;

// The router's logits, choices and plan of few tokens (sm90_route_plan.cu): most tokens, blocks of its one cluster, threads
// of one, experts of a warp that multiplies and most of such warps; bytes of shared memory for 64 k, with so many warps.
constexpr uint32_t ROUTE_PLAN_TOKENS = 8, ROUTE_PLAN_BLOCKS = 8, ROUTE_PLAN_THREADS = 256;
constexpr uint32_t ROUTE_PLAN_WARP_EXPERTS = 16, ROUTE_PLAN_WARPS = 2, ROUTE_PLAN_ROW_BYTES = 1024, ROUTE_PLAN_WEIGHT_BYTES = 2048;
constexpr uint32_t ROUTE_PLAN_SMEM = 212992;

// Hopper's weight gradients (sm90_wgrad.cu): columns of a tile of the narrower and of the wider side.
constexpr uint32_t WGRAD_BLOCK_M = 128, WGRAD_BLOCK_N = 256, WGRAD_THREADS = 384, WGRAD_SMEM = 230464;

// The router's products on Hopper (sm90_linear.cu): tokens or experts of a tile, columns of a tile of the weight's
// gradient; of the tokens' gradient also the columns of the weight that a block keeps and the most experts.
constexpr uint32_t SM90_LINEAR_TILE = 64, SM90_LINEAR_THREADS = 160, SM90_LINEAR_SMEM = 99424;
constexpr uint32_t SM90_LINEAR_DW_COLUMNS = 128;
constexpr uint32_t SM90_LINEAR_DX_TILE = 64, SM90_LINEAR_DX_THREADS = 256, SM90_LINEAR_DX_SMEM = 230456;
// A block of the tokens' gradient has so many of the weight's numbers at most: 512 columns of 128 experts, or 256 of 256.
constexpr uint32_t SM90_LINEAR_DX_NUMBERS = 65536, SM90_LINEAR_DX_COLUMNS = 512, SM90_LINEAR_DX_EXPERTS = 256;

// Hopper's products of many rows with 4-bit weights (sm90/w4a16_pipeline.cuh): weight rows and rows of a tile.
constexpr uint32_t W4A16_BLOCK_M = 128, W4A16_BLOCK_N = 256, W4A16_THREADS = 512, W4A16_SMEM = 231040;
// Those of few rows (w4a16_decode.cu): columns of a weight in a step, those of a thread of a quad, weight rows of a
// warp; warps of a block of tiles of 8 rows, and of up to 16.
constexpr uint32_t DECODE_STEP = 256, DECODE_THREAD_STEP = 64, DECODE_WARP_COLUMNS = 32;
constexpr uint32_t DECODE8_WARPS = 4, DECODE16_WARPS = 8;

// Casts, amaxes and back (nvfp4_cast.cu, nvfp4_cast_aligned.cu, mxfp8_cast.cu, fp8_block_cast.cu, quant_amax.cu,
// dequantize.cu): threads of a block.
constexpr uint32_t QUANT_THREADS = 256;
// Bytes of a matrix without gaps that a thread casts along rows; of 16 x 16 tiles to NVFP4, blocks that it takes.
constexpr uint32_t CAST_THREAD_BYTES = 128, NVFP4_TILED_THREAD_BLOCKS = 2;
// Fp8 blocks of rows (fp8_block_cast.cu, dequantize.cu): columns of one; those that a warp casts.
constexpr uint32_t FP8_BLOCK_COLUMNS = 128, FP8_BLOCK_WARP_BLOCKS = 4;
// Casts to NVFP4: shared memory without and with columns (nvfp4_cast.cu), of whole panels to nearest and stochastically
// (nvfp4_cast_aligned.cu); rows and columns that a block of these takes, and what those of a matrix are multiples of.
constexpr uint32_t NVFP4_CAST_SMEM = 35072, NVFP4_CAST_COLUMNS_SMEM = 46336;
constexpr uint32_t NVFP4_ALIGNED_SMEM = 93264, NVFP4_ALIGNED_STOCHASTIC_SMEM = 74832;
constexpr uint32_t NVFP4_ALIGNED_ROWS = 256, NVFP4_ALIGNED_COLUMNS = 512, NVFP4_ALIGNED_MULTIPLE = 128;
// Rows of a panel of any cast, and bytes of one (quant/quantize.cuh).
constexpr uint32_t PANEL_ROWS = 128, PANEL_BYTES = 256;

// Amaxes (quant_amax.cu): bytes of a matrix that a block takes; elements of a line that a thread takes, where those lie
// apart; rows of a matrix that it takes after the transform; threads of the block that clears a launch's outputs.
constexpr uint32_t AMAX_SPAN = 1 << 17, AMAX_LINE_ELEMENTS = 256, AMAX_TRANSFORMED_ROWS = 64, AMAX_ZERO_THREADS = 64;
// Back to floating point (dequantize.cu, sm90_dequantize.cu): eights of elements that a thread takes, and a block.
constexpr uint32_t DEQUANTIZE_THREAD_EIGHTS = 8, DEQUANTIZE_SPAN = QUANT_THREADS * DEQUANTIZE_THREAD_EIGHTS;

// The router (router.cu): most threads of a block, a warp of which takes a token, and those of the kernel that
// renormalizes kept weights, one of which does.
constexpr uint32_t ROUTER_THREADS = 256, RENORMALIZE_THREADS = 128;
// Rows of E words that a warp works on; experts of which a warp holds a token's scores in registers.
constexpr uint32_t ROUTER_WORK_ROWS = 6, ROUTER_REGISTER_EXPERTS = 256;
// Auxiliary losses (aux_loss.cu): tokens that sums take at a time; most threads of a block of scores or chunks, those
// of a block of totals or coefficients, and of the block that adds the loss up.
constexpr uint32_t AUX_CHUNK = 64, AUX_THREADS = 256, AUX_NUMBERS_THREADS = 128, AUX_TOTAL_THREADS = 256;

// Plans and records (plan.cu, routing_records.cu, all_to_all_plan.cu): threads of a block, and of the one block that
// lays out segments or makes a small plan whole. Blocks that walk over choices are warps.
constexpr uint32_t PLAN_THREADS = 256, PLAN_SEGMENTS_THREADS = 1024;

// Loops that move and add rows, or add parts of a sum (permute.cu, concat_rows.cu, sum_parts of linear.cu): threads of
// a block, the most of one that adds the rows of a token.
constexpr uint32_t PERMUTE_THREADS = 256;
// Ranks' shares (permute.cu): elements that a thread adds at a time, and sums that wait for their pair, each of twice
// as many parts as the one before.
constexpr uint32_t ADD_SHARES_ELEMENTS = 4, ADD_SHARES_LEVELS = 16;
// Sums of columns (wgrad.cu): threads of a block, and its columns.
constexpr uint32_t COLUMN_SUMS_THREADS = 256, COLUMN_SUMS_COLUMNS = 32;

// A step of AdamW (adamw.cu): threads of a block.
constexpr uint32_t ADAMW_THREADS = 256;
