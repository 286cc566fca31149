// Descriptions that the host passes to kernels by value, and the numbers that both sides know.
//
// `cargo run -p xtask -- params` makes src/cuda/bindings.rs from this file and those that it includes, with the layout
// asserted; pointers, which the host does not follow, are u64 there. Every field is 8 bytes wide, or an array of such
// words, so no compiler has padding to disagree on.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "shapes.h"
#include "nvlink.h"

// Element types.
enum ElementType : int64_t { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_BF16 = 2 };
// Activations.
enum ActivationFunction : int64_t { ACT_SILU = 0, ACT_GELU = 1, ACT_CLAMPED = 2, ACT_RELU2 = 3 };

// Faults that a kernel finds, and the detail that it raises with each. A larger code is told before a smaller one.
enum Fault : unsigned long long {
    FAULT_SEGMENT = 1,   // a segment outside its layout, or in another: the group, above the call's site
    FAULT_MAP = 2,       // a map's entry past the tensor: the entry, above the call's site with the operand
    FAULT_ID = 3,        // ids of a backward that name no expert: the choice, above its origin
    FAULT_SUMS = 4,      // auxiliary sums over no tokens: the origin
    FAULT_CHOICE = 5,    // an id that is no expert, or twice in a token: the choice, above its origin
    FAULT_CAPACITY = 6,  // a layout of too few rows: these; need and rank in words of their own
    FAULT_RECORD = 7,    // records that are odd: the first such rank, above the origin
    FAULT_PEER = 8,      // a peer that was waited for in vain: what for (NvLinkPhase) above the peer, above the origin
    FAULT_END = 9,       // no code
};
// Whose map it is: that of the rows of a call's first operand, or of its second.
enum Operand : long long { OPERAND_FIRST = 0, OPERAND_SECOND = 1 };
// Words of the status: the fault, its code above a detail that is inverted; the first NaN logit, token above expert
// above origin; rows that a layout would have needed, above its rank and origin, and above what is left of those there
// are; of the first bad choice the fault that it raised, the id, one more than the column that has it too (0: none) and
// experts above top k; of the first record with a bad id the fault that it raised, its rank, token, column, id, one more
// than the column that has it too, layer and experts; of a backward's first bad id it, top k and experts, each below the
// choice, which is inverted; what the first such entry of a map holds, and where the first such segment begins and what it
// counts, in halves of 32 bits, the lower one first. Of each half there are two words, the largest and the smallest
// (inverted) that was met there, each below the entry or the segment, which is inverted.
enum StatusWord : int {
    STATUS_FAULT = 0, STATUS_NAN = 1, STATUS_NEEDED_RANK = 2, STATUS_NEEDED_ROWS = 3, STATUS_CHOICE = 4, STATUS_CHOICE_ID = 5,
    STATUS_CHOICE_FIRST = 6, STATUS_CHOICE_SIZES = 7, STATUS_RECORD = 8, STATUS_RECORD_BAD = 9, STATUS_RECORD_LAYER = 14,
    STATUS_RECORD_EXPERTS = 15, STATUS_ID = 16, STATUS_ID_TOP_K = 17, STATUS_ID_EXPERTS = 18, STATUS_MAP_FOUND = 19,
    STATUS_SEGMENT_FOUND = 21, STATUS_WORDS = 29
};
// An origin is the host's number for the rank and layer that a call is made for. It stands below the token and expert
// of a NaN logit, below the rank of a capacity, and below the choice in the detail of a bad one or the rank of an odd
// record.
constexpr uint32_t FAULT_DETAIL_BITS = 48, NAN_EXPERT_BITS = 22, ORIGIN_BITS = 11, NEEDED_RANK_BITS = 16;
// A site is what a call that follows segments and maps tells of itself: the host's number for the call, from 1 on, above
// an operand, above the origin. A fault's detail has 32 bits above it.
constexpr uint32_t SITE_OPERAND_BITS = 2, SITE_CALL_BITS = 3, SITE_BITS = ORIGIN_BITS + SITE_OPERAND_BITS + SITE_CALL_BITS;

// A matrix product over groups of rows, with its epilogue. Null pointers mean "none".
struct GemmParams {
    const void* a;             // rows of A
    const int32_t* a_map;      // row of A for each slot
    int64_t a_rows;            // rows that A has
    int64_t a_type;
    const void* b;             // weights of all groups, or the right rows of a weight gradient
    const int32_t* b_map;
    int64_t b_rows;
    int64_t b_type;
    const int4* tiles;         // (group, first slot, rows, -) of each row tile; null: one group of m rows
    const int32_t* tile_count;
    const int64_t* offsets;    // segments, for weight gradients
    const int64_t* counts;
    int64_t m;                 // slots; rows of a weight gradient
    int64_t n;                 // columns of the output (of the gate alone, with a gate)
    int64_t k;
    int64_t groups;
    const void* bias;
    int64_t bias_type;
    const float* scale;        // by slot, on the product
    const float* bias_scale;   // by slot, on the bias
    const float* out_scale;    // by slot, on the activation
    const void* pre;
    void* pre_out;
    void* out;
    int64_t out_type;
    int64_t accumulate;
    void* hidden;
    float* partial;            // [slots, n tiles] dots of a row
    const void* x;             // rows that the product is dotted with
    const int32_t* x_map;
    int64_t x_rows;
    int64_t activation;
    double alpha;
    double limit;
    unsigned long long* fault;
    int64_t site;
    int64_t vector_a;          // rows of A start at multiples of 16 bytes
    int64_t vector_b;
    int64_t m_tiles;           // upper bound
    int64_t n_tiles;
    int64_t split;             // parts that k is cut into
    uint32_t* ticket;          // tiles of clusters that were taken, 0 before and after
    const unsigned long long* arrived; // groups of experts whose rows of A have come; null: all have
    int64_t arrived_experts;   // of a group
    const int32_t* out_scale_map; // of each slot its value in out_scale, or -1; null: that of its number
    int64_t out_scales;
};

// A weight gradient on Hopper. Null pointers mean "none".
struct WeightGradParams {
    const void* mapped;        // [mapped rows, narrow], the operand that may lie behind a map
    const int32_t* map;        // its row for each slot; null: slot order
    int64_t mapped_rows;
    int64_t narrow;
    int64_t wide;              // columns of the other operand, which lies in slot order
    const int64_t* offsets;
    const int64_t* counts;
    int64_t slots;
    int64_t groups;
    int64_t first;             // number of the first of them, for faults
    int64_t transposed;        // the output is [groups, wide, narrow] instead of [groups, narrow, wide]
    int64_t out_type;          // the operands' type, or f32
    int64_t accumulate;
    unsigned long long* fault;
    int64_t site;
};

// Row tiles of a layout, in a list for every `chunk` groups, whose tiles number groups from the chunk's first on.
struct TileListParams {
    const int64_t* offsets;
    const int64_t* counts;
    int64_t groups;
    int64_t chunk;
    int64_t rows;
    int64_t tile_rows;
    int4* tiles;               // [chunks, max_tiles]
    int32_t* tile_count;       // [chunks]
    uint32_t* tickets;         // [chunks], cleared
    int64_t max_tiles;         // room of a chunk
    unsigned long long* fault;
    int64_t site;
};

// The plan of a group of one rank: choices to slots.
struct LocalPlanParams {
    const void* ids;           // [T, K], int64 or int32
    int64_t wide;              // 1: int64
    int64_t choices;           // T K
    int64_t top_k;
    int64_t experts;
    int64_t alignment;
    int64_t expert_limit;      // choices that an expert keeps
    int64_t rows;              // N
    int64_t may_drop;          // 0: slots from N on are an error
    int64_t chunk;             // choices that a warp walks
    int64_t chunks;
    int32_t* before;           // [E, chunks] scratch: choices of each expert in chunks before
    int64_t* offsets;          // [E]
    int64_t* counts;           // [E]
    int64_t* stats;            // [2 E + 2]: choices of each expert, padded rows of each, rows needed, choices dropped
    int32_t* kept;             // [T, K]
    int32_t* row_map;          // [N], -1 where no choice is
    int32_t* weight_map;       // the same
    int32_t* return_map;       // [T, K]
    float* slot_weights;       // [N] weight of each slot, 0 where no choice is, where the kernel has chosen; else null
    int4* tiles;               // row tiles of the layout, behind one that holds their number; null: not wanted
    int64_t tile_rows;
    int64_t max_tiles;
    int64_t paired;            // 0: tiles in the order of slots
    unsigned long long* fault;
    unsigned long long* report; // the host's copy of the status words
    int64_t origin;
};

// A rank's choices, to be written as its record (src/plan/routing_record.rs): a header of 24 words and a text, then ids.
struct WriteRecordParams {
    const void* ids;           // [T, K], int64 or int32
    int64_t wide;              // 1: int64
    int64_t choices;           // T K
    int64_t top_k;
    int64_t experts;
    int64_t rank;
    unsigned long long* record;
    unsigned long long* errors; // src/plan/deferred_errors.rs
    int64_t header[26];        // as it is where no id is bad
};

// The plan of one rank from all ranks' records.
struct RecordsPlanParams {
    const uint8_t* records;    // [R, size]; a multiple of 4 bytes each
    int64_t size;
    int64_t ranks;
    int64_t rank;
    int64_t max_tokens;        // that a record has room for
    int64_t tokens;            // of this rank
    int64_t top_k;
    int64_t experts;
    int64_t alignment;
    double factor;             // an expert keeps this many times its share of the choices; negative: all
    int64_t rows;              // N
    int64_t may_drop;          // 0: slots from N on are an error
    int64_t host_waits;        // the host waits for the segments and looks at the records itself
    int64_t padded_tokens;     // rows of each rank among those that arrive
    int64_t chunk;             // choices that a warp walks, of R max_tokens K
    int64_t chunks;
    int32_t* before;           // [E, chunks] scratch: choices of each expert in chunks before
    int64_t* scratch;          // [3, E]: rows before each expert, its first slot on its rank, choices that it keeps
    int64_t* offsets;          // [L]
    int64_t* counts;           // [L]
    int64_t* stats;            // [E + L + 5 + 3 R]: choices of each expert, padded rows of each local one, rows needed,
                               // choices dropped, whether something is wrong, rows and rank of a capacity that is too
                               // small (where the host waits); of each rank tokens, backward, pending
    int32_t* kept;             // [T, K]
    int32_t* row_map;          // [N], filled with -1
    int32_t* weight_map;       // [N], filled with -1
    int32_t* return_map;       // [R padded_tokens, K]; for messages [T, K]
    unsigned long long* errors;
    unsigned long long* fault;
    int2* places;              // [R max_tokens K] scratch: rank and slot where each choice is kept, or -1
    int32_t* message_counts;   // [4 R, chunks] scratch: choices and tokens of each message in chunks before
    int64_t* totals;           // [4 R]: choices from each rank, their tokens, choices to each rank, their tokens
    int32_t* send_tokens;
    int32_t* send_choices;
    int32_t* return_slots;
    int32_t* token_rows;       // rows in zones (nvlink.h): [T, R], a token's row in the message to each rank, or -1
    int32_t* row_slots;        // [R, padded_tokens, K]: slots here of each row that arrives, or -1
    int32_t* row_tokens;       // [R, padded_tokens]: its token there
    int64_t* arrived;          // [R]: rows that arrive from each rank
    int64_t origin;
};

// A prepare over NVLink (nvlink.h) in one kernel: this rank's record, all ranks' records, the plan. Of `plan` the records,
// chunks and scratch are the kernel's own.
struct NvLinkPlanParams {
    NvLinkCall call;
    int64_t bank;              // bytes of a bank of records; the call's zone is where the banks begin
    WriteRecordParams record;  // without a place
    RecordsPlanParams plan;
    int64_t exchange;          // 0: the last call has brought the records
    int64_t maps;              // 0: segments and statistics alone
    int64_t map_rows;          // entries of the slots' maps; `plan.rows` bounds the slots of every rank
    int64_t block_tokens;      // tokens, of R max_tokens, that a block plans
    uint16_t* counts;          // [blocks, E], E up to a multiple of 4: choices of each expert in each block's tokens
    int32_t* tallies;          // [blocks, 2 R + 1]: of each block's tokens those that come here from each rank, those that
                               // go from here to each, and choices of this rank's that are dropped
    void* records;             // [R, size]: all ranks' for a host that waits; null: it reads none
    unsigned long long* report; // the host's copy of the status words
};

// The layout that another library made of all ranks' choices.
struct ExternalLayoutParams {
    const int64_t* loads;      // [E] choices of each expert over all ranks
    const int64_t* starts;     // [L] first slot of each local expert
    const int64_t* total;      // padded rows with nothing dropped
    int64_t first;             // the first local expert
    int64_t groups;            // L
    int64_t rows;              // N
    int64_t* offsets;          // [L]
    int64_t* counts;           // [L] filled slots
    int32_t* row_map;          // [N]
    unsigned long long* fault;
    int64_t origin;
};

// Where segments begin that hold all ranks' choices of the local experts.
struct SegmentStartsParams {
    const int64_t* loads;      // [E] choices of each expert over all ranks
    int64_t first;             // the first local expert
    int64_t groups;            // L
    int64_t alignment;
    int64_t* starts;           // [L]
    int64_t* total;            // padded rows
};

// Rows that arrive in any order, each with a number of its token behind its weights.
struct LowLatencyRowsParams {
    const int32_t* ids;        // packing: [T, K]; sorting: [R M, K + 1] as they arrived
    const float* weights;      // the same
    const int32_t* counts;     // [R] rows that arrived
    int64_t tokens;            // packing: T; else M
    int64_t ranks;             // R
    int64_t top_k;             // K
    int64_t slots;             // N
    int32_t* out_ids;          // packing: [T, K + 1]; sorting: [R M, K] by token, filled with -1
    float* out_weights;        // the same
    int32_t* row_of;           // [R M] row of each token, filled with -1
    int32_t* token_of;         // [R M] token of each row, or -1
    int32_t* row_map;          // [N] tokens, which become rows
    const int32_t* return_map; // [R M, K] slots by token
    int32_t* out_map;          // [R M, K] slots by row
};

// Moving and adding rows; elementwise functions.
struct RowsOpParams {
    const void* source;
    const int32_t* map;
    void* out;
    int64_t source_rows;
    int64_t out_rows;
    int64_t width;             // bytes of a row (gather), elements of a row (reduce), elements (elementwise)
    int64_t fan;               // map entries of an output row
    int64_t type;
    int64_t word;              // bytes that rows are moved in: 16, 4 or 1
    const float* grad;
    unsigned long long* fault;
    int64_t site;
};

// Rows of two matrices of bytes behind each other, then zeros; or `back`, into the two.
struct ConcatRowsParams {
    uint8_t* left;
    uint8_t* right;
    uint8_t* whole;
    int64_t rows;
    int64_t left_bytes;        // of a row
    int64_t right_bytes;
    int64_t whole_bytes;       // at least both
    int64_t word;              // bytes that are moved at a time: 4 or 1
    int64_t back;
};

// Ranks' shares of a gradient, `parts` blocks of `count` elements, to be added to `main` in pairs.
struct AddSharesParams {
    const void* own;           // block `rank` of `parts`
    const void* others;        // all but that, back to back
    float* main;
    int64_t count;
    int64_t parts;
    int64_t rank;
    int64_t wide;              // four elements of every block may be moved at once
    int64_t first;             // main is not read: the sum is added to zeros
    double scale;
};

// Sums of a slot's dots: partial sums over tiles, and a bias' dot with the gradient row.
struct SlotDotsParams {
    const float* partial;
    int64_t parts;
    const void* grad;
    const int32_t* grad_map;
    int64_t grad_rows;
    const void* bias;
    int64_t type;
    int64_t width;
    const int4* tiles;
    const int32_t* tile_count;
    float* out;
    unsigned long long* fault;
    int64_t site;
};

// Sums of rows over each group: gradients of biases.
struct ColumnSumsParams {
    const void* rows;
    const int32_t* map;
    int64_t base_rows;
    int64_t type;
    const float* scale;
    const int64_t* offsets;    // null: one group of all slots
    const int64_t* counts;
    int64_t slots;
    int64_t groups;
    int64_t width;
    void* out;
    int64_t out_type;
    int64_t accumulate;
    unsigned long long* fault;
    int64_t site;
};

// Scores of experts, and what groups of experts are ranked by.
enum RouterScore : int64_t { SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1, SCORE_TOPK_SOFTMAX = 2, SCORE_TOPK_SIGMOID = 3, SCORE_SPARSEMIXER = 4 };
enum GroupRank : int64_t { RANK_MAX = 0, RANK_TOP2 = 1 };

// Routing formula and tensors.
struct RoutingParams {
    const float* logits;
    const void* bias;
    int64_t bias_type;
    int32_t* ids;
    float* weights;
    const float* d_weights;
    float* d_logits;
    float* scratch;            // 6 E words a warp, where they do not fit shared memory
    int64_t tokens;
    int64_t experts;
    int64_t top_k;
    int64_t score;
    double epsilon;            // sparsemixer
    int64_t groups;            // 0: no group limit
    int64_t keep;
    int64_t rank_by;
    int64_t renorm;            // 1: divide by the norm
    double p;
    double norm_epsilon;
    double floor;
    double scale;
    double jitter;             // 0: none
    unsigned long long key;
    unsigned long long first_token;
    const double* aux_coef;    // [sequences, E], null: no balance loss
    int64_t sequence;          // tokens of a sequence
    int64_t aux_sigmoid;
    const double* aux_z;       // one number, null: no z-loss
    unsigned long long* fault;
    int64_t origin;
};

// Sums for auxiliary losses and their coefficients.
struct AuxLossParams {
    const float* logits;
    const int32_t* ids;
    float* scores;             // [T, E] scratch
    int32_t* picks;            // [T, K] scratch: choices by softmax
    double* z_terms;           // [T] scratch
    double* partial;           // [sequences, chunks, 2 E + 1] scratch
    double* totals;            // [sequences, 2 E + 1] scratch
    float* out;                // [2 E + 4]; of aux_loss_value one
    const float* sums;
    double* coef;              // [sequences, E]
    double* z_coef;
    int64_t tokens;
    int64_t experts;
    int64_t top_k;
    int64_t sequence;
    int64_t sequences;
    int64_t chunks;            // of 64 tokens in a sequence
    int64_t by_sequence;
    int64_t hugging_face;
    int64_t sigmoids;
    double balance;            // the coefficient, times the gradient of the loss where the host has that
    double z;
    const float* d_loss;       // that gradient where the device has it
    unsigned long long* fault;
    int64_t origin;
};

// Weights of tokens with dropped choices.
struct RenormalizeKeptParams {
    const float* weights;
    const int32_t* kept;
    const float* grad;
    float* out;
    int64_t tokens;
    int64_t top_k;
};

// A matrix to quantize: element (i, j) is `base[i row_stride + j column_stride]`, in elements of its type.
struct StridedMatrix {
    const void* base;
    int64_t rows;
    int64_t columns;
    int64_t row_stride;
    int64_t column_stride;
    int64_t vector;            // columns lie together, in whole aligned words of 16 bytes a row
};

// One matrix's amax among many.
struct AmaxJob {
    StridedMatrix matrix;
    int64_t type;
    unsigned* out;             // bits of the amax
    unsigned* other;           // a second place for it; null: none
    int64_t first_block;       // of the launch's
};
// Matrices that one launch takes the amaxes of.
constexpr size_t AMAX_JOBS = 40;
struct AmaxJobs {
    AmaxJob jobs[AMAX_JOBS];
    int64_t count;
};

// Amaxes of lines, or of a transformed matrix.
struct AmaxLinesParams {
    StridedMatrix matrix;      // lines are its rows
    int64_t type;
    unsigned* out;             // one a line, or one
    int64_t signs;             // of the transform
};

// One direction of a quantized matrix. Null codes: not wanted.
struct QuantSide {
    uint8_t* codes;
    uint8_t* scales;
    const float* amax;
    int64_t code_bytes;        // of a line
    int64_t blocks;            // of a line
    int64_t first_line;        // for random bits
    int64_t first_block;
};
// A matrix to NVFP4 (codes, scales and amax of each side), to MXFP8 (codes and scales) or to fp8 blocks (those of its
// rows; f32 scales, at any address).
struct QuantCastParams {
    StridedMatrix matrix;
    QuantSide rows;
    QuantSide columns;
    int64_t by_line;           // an amax a line
    int64_t stream;
    int64_t signs;             // of the transform of columns; -1: none
    int64_t floor;             // MXFP8: scales rounded down
    unsigned keys[14];         // of the seven rounds of random bits, from the seed
};

// A quantized matrix back to floating point, one of many.
struct DequantizeJob {
    const uint8_t* codes;
    const uint8_t* scales;     // fp8 blocks: f32, at any address
    const float* amax;
    void* out;
    int64_t out_type;
    int64_t lines;
    int64_t len;
    int64_t code_bytes;        // of a line
    int64_t blocks;            // scales of a line
    int64_t by_line;           // an amax a line; MXFP8: blocks along columns
    int64_t modelopt;
    int64_t first_block;       // of the launch's
};
// Matrices that one launch brings back to floating point.
constexpr size_t DEQUANTIZE_JOBS = 40;
struct DequantizeJobs {
    DequantizeJob jobs[DEQUANTIZE_JOBS];
    int64_t count;
};

// Block scales to another order.
struct SwizzleScalesParams {
    const uint8_t* scales;
    uint8_t* out;
    int64_t lines;
    int64_t blocks;            // of a line
    int64_t back;              // to row-major
};

// Quantized weights of all groups, [groups, rows, columns] as numbers. Blocks run along columns.
struct QuantWeightParams {
    const uint8_t* codes;      // rows of `code_bytes`
    const void* scales;        // FP4: rows of `blocks` bytes; FP8: f32, a number a block of 128 x 128
    const float* factors;      // `parts` a group, each for as many rows; null: ones
    int64_t format;
    int64_t rows;
    int64_t columns;
    int64_t code_bytes;
    int64_t blocks;            // scales of a row (of blocks)
    int64_t parts;
};
// Formats of weights: E2M1 with an E4M3 scale each 16; E2M1 with an E8M0 scale each 32; E4M3 with f32 scales.
enum WeightEncoding : int64_t { WEIGHT_NVFP4 = 0, WEIGHT_MXFP4 = 1, WEIGHT_FP8 = 2 };

// Some groups' quantized weights as 16-bit numbers.
struct DequantizeExpertsParams {
    const int64_t* counts;     // rows of each of these groups: weights of one without any are not written
    void* out;                 // [groups of the launch, rows, columns]
    int64_t first;             // the first of them
    int64_t blocks;            // of the launch's, a group
};

// ---------------------------------------------------------------------------------------------------- optimizer steps

// A leaf of a norm: most elements, and its partial sums (src/kernels/optimizer.rs states the order of the sums).
constexpr int64_t NORM_LEAF = 4096, NORM_LEAF_SUMS = 128;
// Leaves that a warp adds, as a power of two, at most.
constexpr int64_t NORM_TASK_HEIGHT = 2;

// Squares of one gradient among many: a warp a task of 2^height leaves, at most NORM_TASK_HEIGHT high.
struct SquareJob {
    const void* gradient;
    double* out;               // a number a task
    int64_t width;             // elements of a row
    int64_t row_leaves;
    int64_t leaves;
    int64_t height;
    int64_t type;
    int64_t wide;              // four elements may be read at once
    int64_t first_task;        // of the launch's
};
constexpr size_t SQUARE_JOBS = 40;
struct SquareJobs {
    SquareJob jobs[SQUARE_JOBS];
    int64_t count;
    int64_t tasks;
};

// Trees over numbers: a block a node.
struct TreeJob {
    const double* values;
    double* out;
    int64_t count;             // of values
    int64_t height;            // of a node: values of it, as a power of two
    int64_t first_node;        // of the launch's
};
constexpr size_t TREE_JOBS = 80;
struct TreeJobs {
    TreeJob jobs[TREE_JOBS];
    int64_t count;
};

// A tree over each weight's nodes: a block a weight.
struct NormSumsParams {
    const double* nodes;
    const int32_t* order;
    const int32_t* starts;
    double* sums;
    int64_t node_count;
};

// Numbers of a step.
enum StepState : int64_t { STATE_SCALE = 0, STATE_GOOD = 1, STATE_STEP = 2, STATE_SKIPPED = 3, STATE_NORM = 4, STATE_FACTOR = 5, STATE_SKIP = 6, STATE_NUMBERS = 8 };
enum StepCoefficient : int64_t {
    COEFFICIENT_SKIP = 0, COEFFICIENT_FACTOR = 1, COEFFICIENT_FIRST = 2, COEFFICIENT_SECOND = 3, COEFFICIENT_RATE = 4,
    COEFFICIENT_ROOT = 5, COEFFICIENT_EPSILON = 6, COEFFICIENT_DECAY = 7, COEFFICIENT_STEP = 8, COEFFICIENTS = 9
};
// learning rate, beta 1, beta 2, epsilon, weight decay; powers of both betas.
constexpr int64_t GROUP_SETTINGS = 5, GROUP_STATE = 2;
struct StepControlParams {
    const double* sums;        // squares of each weight's gradient; null: no norm
    int64_t weights;
    const double* settings;
    double* state;
    double* coefficients;
    int64_t groups;
    int64_t scaled;            // the loss has a factor that moves
    double max_norm;           // infinite: no clipping
    double growth;
    double backoff;
    double interval;
    double min;
    double max;
};

// A parameter of AdamW among many.
struct AdamWJob {
    const void* gradient;
    float* main;
    void* rounded;             // null: the main weight is the parameter
    void* first;
    void* second;
    int64_t count;
    int64_t element;           // number of the first one in the whole parameter
    int64_t number;            // of the parameter
    int64_t types;             // of the gradient, 4 * of the rounded parameter, 16: moments in bf16, 32: four at once
    int64_t first_block;       // of the launch's
};
constexpr size_t ADAMW_JOBS = 48;
// Elements of a block.
constexpr int64_t ADAMW_SPAN = 8192;
struct AdamWJobs {
    AdamWJob jobs[ADAMW_JOBS];
    const double* coefficients;
    int64_t count;
    unsigned keys[14];         // of the seven rounds of random bits
};

// Elements to another type.
struct ConvertTypeParams {
    const void* from;
    void* to;
    int64_t from_type;         // -1: f64
    int64_t to_type;
    int64_t count;
};
