// Descriptions that the host passes to kernels by value, and the numbers that both sides know.
//
// `cargo run -p xtask -- params` makes src/ops/params.rs from this file, with the layout asserted; pointers, which the
// host does not follow, are u64 there. Fields of 8 bytes stand before those of 4, so that no padding lies between them.
// Null pointers mean "none" where that is said. D is the number of entries of a head.
#pragma once
#include <stdint.h>

// Threads of a block where no others are named.
constexpr int32_t WARPS = 4, THREADS = 32 * WARPS;

// Keys of a step.
constexpr int32_t ATTENTION_KEYS = 64;

// Entries between neighbors along sequence, head and position.
struct Strides {
    int64_t sequence;
    int64_t head;
    int64_t row;
};

// Attention of blocks of queries over blocks of keys.
struct AttentionParams {
    const void* q;             // [sequence, head, query, D]
    const void* k;             // [sequence, key head, position, D]
    const void* v;             // [sequence, key head, position, V]
    const void* sinks;         // a logit for each head; null: none
    void* out;                 // [sequence, query, head, V]
    float* log_sums;           // [sequence, head, query], natural logarithms of sums of exponentials; null: not asked for
    Strides q_strides;
    Strides k_strides;
    Strides v_strides;
    int32_t heads;
    int32_t key_heads;
    int32_t queries;           // of a sequence
    int32_t positions;         // keys of a sequence
    int32_t first;             // position of the first query
    int32_t first_key;         // position of the first key
    int32_t window;            // positions that a query sees, its own the last; 0: all
    int32_t chunk;             // a query sees positions of its own chunk of so many; 0: no chunks
    float scale;
};

// Gradients of an attention, from its operands, its result and that one's gradient.
struct AttentionBackwardParams {
    AttentionParams forward;   // read alone: operands, `out` and `log_sums`
    const void* d_out;         // [sequence, query, head, V]
    float* dots;               // [sequence, head, query], products of rows of `out` and `d_out`
    void* d_q;                 // [sequence, head, query, D]
    void* d_k;                 // [sequence, key head, position, D]
    void* d_v;                 // [sequence, key head, position, V]
    Strides d_out_strides;
};

// Cache positions of a step, of which each warp has 16; query heads of a block, the rows of a matrix instruction; most
// runs that the cache positions of a head are cut into.
constexpr int32_t CACHE_STEP = 16 * WARPS, CACHE_HEADS = 16, CACHE_MOST_RUNS = 64;

// A decode step's attention over a static cache.
struct CacheAttentionParams {
    const void* q;             // [sequence, head, D]
    const void* k;             // [sequence, key head, cache position, D]
    const void* v;
    const uint32_t* filled;    // how many cache positions are, from the first on
    const void* sinks;         // a logit for each head; null: none
    float* partial;            // [sequence, head, run, D], sums of each run; unused with one run
    float2* stats;             // [sequence, head, run], their maximum and sum; unused with one run
    void* out;                 // [sequence, head, D], with one run
    int32_t heads;
    int32_t key_heads;
    int32_t positions;
    int32_t runs;
    float scale;
};

// The runs of each head joined.
struct CacheCombineParams {
    const float* partial;      // as CacheAttentionParams has them
    const float2* stats;
    const void* sinks;
    void* out;
    int32_t heads;
    int32_t runs;
};

// Warps of a block, a row of the weight each; most rows of x.
constexpr int32_t GEMV_WARPS = 8, GEMV_MOST_ROWS = 4;

// Products of up to four rows with a weight.
struct GemvParams {
    const void* x;             // [rows, inputs], inputs a multiple of 8
    const void* w;             // [outputs, inputs]
    const void* bias;          // [outputs]; null: none
    void* y;                   // [rows, outputs]
    int32_t inputs;
    int32_t outputs;
};

// Heads of the product of queries, keys and values: norm, rotary embedding, and each where attention reads it.
struct QkNormRopeParams {
    const void* qkv;           // [sequence, token, heads + 2 key heads, D]
    void* q;                   // [sequence, head, token, D]
    void* k;                   // [sequence, key head, cache position, D]
    void* v;
    const uint32_t* position;  // cache position of the first token; null: 0
    const void* q_weight;      // [D], of the queries' norm; null: no norm
    const void* k_weight;
    const void* cos;           // [token, rotated / 2], of pairs of entries i and rotated / 2 + i
    const void* sin;
    int32_t sequences;
    int32_t tokens;            // of a sequence
    int32_t heads;
    int32_t key_heads;
    int32_t dim;               // D
    int32_t rotated;           // entries of a head, an even number; 0: none
    int32_t positions;         // cache positions of a key head
    float eps;
};

// Threads of a block that has a row, and of one that has a shorter row.
constexpr int32_t ROW_THREADS = 512, SMALL_ROW_THREADS = 256;

// A norm of rows: x - mean, if centered, over the root of its mean square and eps, times weight + weight_offset, + bias.
struct NormParams {
    const void* x;             // [rows, size]
    const void* y;             // added to x before; null: nothing is
    const void* weight;        // [size]; null: 1, whatever the offset
    const void* bias;          // [size]; null: none
    void* sums;                // x + y; unused without y
    void* out;
    int32_t rows;
    int32_t size;
    int32_t centered;          // 1: rows are less their means; 0: they are not
    float weight_offset;
    float eps;
};

// Threads of a block that adds up columns.
constexpr int32_t NORM_COLUMN_THREADS = 256;

// Gradients of a norm of rows: of x by one kernel, which writes statistics, of weight and bias by another, which reads
// them.
struct NormBackwardParams {
    const void* x;             // as NormParams has them
    const void* weight;
    const void* d_out;         // [rows, size]
    void* d_x;                 // null: not asked for
    float2* stats;             // of each row, its mean (0 if not centered) and 1 over the root; null: not asked for
    float* d_weight;           // [blocks of rows, size], sums over the rows of each; null: not asked for
    float* d_bias;             // the same
    int32_t rows;
    int32_t size;
    int32_t centered;
    float weight_offset;
    float eps;
    int32_t rows_of_block;     // of the kernel of sums
};

// Softmax of rows.
struct SoftmaxParams {
    const void* x;             // [rows, size]
    void* out;
    int32_t rows;
    int32_t size;
};

// Its gradient.
struct SoftmaxBackwardParams {
    const void* y;             // [rows, size], the result
    const void* d_out;
    void* d_x;
    int32_t rows;
    int32_t size;
};

// The first of each row's largest entries.
struct ArgmaxParams {
    const void* x;             // [rows, size]
    uint32_t* out;             // [rows]
    int32_t size;
};
