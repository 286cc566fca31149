// Calls over windows: memory of each rank that its peers write to with plain stores over NVLink (nvlink.cuh). Included by
// params.h.
#pragma once
#include <stdint.h>

// Ranks of one host that may form a group.
constexpr uint32_t NVLINK_RANKS = 8;
// Threads of a block of the kernels that send tokens and records. Of those that send sums: warps that work on the same
// rows, groups of such warps, each with one more that plans their work, and a last one that tells peers of all groups' rows;
// words of 16 bytes of a row that a thread loads into a place of its ring, places, and bytes of all rings. Choices of a token
// at most.
constexpr uint32_t NVLINK_THREADS = 1024;
constexpr uint32_t NVLINK_SUM_WARPS = 2, NVLINK_SUM_GROUPS = 7, NVLINK_SUM_WORKERS = NVLINK_SUM_GROUPS * NVLINK_SUM_WARPS * 32;
constexpr uint32_t NVLINK_SUM_THREADS = NVLINK_SUM_WORKERS + (NVLINK_SUM_GROUPS + 1) * 32, NVLINK_SUM_WORDS = 2, NVLINK_RING = 13;
constexpr uint32_t NVLINK_SUM_SMEM = NVLINK_RING * NVLINK_SUM_WORDS * 16 * NVLINK_SUM_WORKERS;
constexpr uint32_t NVLINK_TOP_K = 24;
// Blocks and groups of experts of a dispatch that sends by groups at most, and its shared memory for lists of rows.
constexpr uint32_t NVLINK_MARK_BLOCKS = 16, NVLINK_GROUPS = 32, NVLINK_ITEMS_SMEM = 131072;
// What an offset of a zone is a multiple of.
constexpr uint32_t NVLINK_ZONE_UNIT = 256;
// Who gave up, where it was the host.
constexpr uint32_t NVLINK_HOST = 0xffffffff;

// Control words of a rank, of 8 bytes, in lines of 128 bytes by who writes them; zeros at first. A word that ends a wait
// holds the epoch of its call in its upper half.
enum NvLinkWord : int {
    NVLINK_EPOCH = 0,          // calls that this rank has ended, in 32 bits, without 0
    NVLINK_BLOCKS = 1,         // blocks of the present call that have ended
    NVLINK_TICKET = 2,         // pieces of work that warps of the present call have taken
    NVLINK_ERROR = 3,          // what this rank gave up first, as its fault's detail has it: NvLinkPhase above the peer, above
                               // the origin; and from the next word on the epoch, the word that was met, and the ns that
                               // were waited
    NVLINK_BARRIER = 7,        // where the blocks of a plan meet (32 bits): turns over each time that all have come
    NVLINK_ABORT = 16,         // one more than a rank that gave up, the last of several to tell this one, or NVLINK_HOST; 0: none
    NVLINK_READY = 32,         // [R]: the zone that rank r may write to, in units, below the epoch
    NVLINK_DONE = 48,          // [R]: rank r has written all
    NVLINK_RECORDS = 64,       // [2, NVLINK_RANKS]: rank r has written its record into this bank
    NVLINK_MARKS = 80,         // [R, NVLINK_MARK_BLOCKS]: groups that a block of rank r has sent, below the epoch
    NVLINK_ARRIVED = 208,      // written here alone: groups of experts whose rows have come, in a call that sends by groups
    NVLINK_ROWS = 224          // [R, max_tokens]: rank r has written the sum of this row
};
// Each range of words ends before the next begins.
static_assert(NVLINK_BARRIER < NVLINK_ABORT && NVLINK_ABORT < NVLINK_READY);
static_assert(NVLINK_READY + NVLINK_RANKS <= NVLINK_DONE && NVLINK_DONE + NVLINK_RANKS <= NVLINK_RECORDS);
static_assert(NVLINK_RECORDS + 2 * NVLINK_RANKS <= NVLINK_MARKS && NVLINK_MARKS + NVLINK_RANKS * NVLINK_MARK_BLOCKS <= NVLINK_ARRIVED);
static_assert(NVLINK_ARRIVED < NVLINK_ROWS);
// What a rank waited for in vain; or that it came to a call, or was in one, when another, the peer, gave up. That is the last
// of them, as of several faults the smallest is told: what a rank has met itself names who did not come.
enum NvLinkPhase : int { NVLINK_WAIT_READY = 1, NVLINK_WAIT_DONE = 2, NVLINK_WAIT_ROW = 3, NVLINK_WAIT_MARK = 4, NVLINK_STOPPED = 5 };
// Bits of a fault's detail that are the peer, above the origin; the phase lies above them.
constexpr uint32_t NVLINK_PEER_BITS = 8;

// A rank's part in a call.
struct NvLinkCall {
    int64_t rank;
    int64_t ranks;
    unsigned long long words[NVLINK_RANKS];  // each rank's control words as this GPU reaches them
    unsigned long long zones[NVLINK_RANKS];  // and its memory for zones
    int64_t zone;              // where in its own memory the rank receives; a multiple of the unit
    int64_t timeout;           // ns that each wait may take
    int64_t delay;             // tests: ns that some of its blocks and warps idle before what others wait for
    const unsigned long long* stop; // a word of the host's memory that is not 0 when nobody shall wait any more; null: none
    unsigned long long* fault;
    int64_t origin;
};

// A record of each rank that all others get.
struct NvLinkExchangeParams {
    NvLinkCall call;           // its zone: where the banks of records begin, alike on all ranks
    int64_t bank;              // bytes of a bank, which has room for a record of each rank
    const void* source;
    int64_t bytes;             // a multiple of 4
    void* out;                 // [R, bytes]
};

// What travels of each token: `bytes` bytes from `source + token bytes`, to `at` in the receiver's zone, row by row.
struct NvLinkPart {
    const void* source;        // null: this part is absent
    int64_t bytes;
    int64_t word;              // bytes that a row is moved in: 16, 4, 2 or 1
    int64_t at;
};

// Tokens to the ranks that keep a choice of theirs.
struct NvLinkDispatchParams {
    NvLinkCall call;
    NvLinkPart rows;
    NvLinkPart weights;
    NvLinkPart scales;
    const int32_t* token_rows; // [T, R]: the token's row in the message to each rank, or -1
    int64_t tokens;
    int64_t max_tokens;        // rows of a message at most; those of rank r begin at row r max_tokens
};

// The same by groups of the experts of each rank, in their order.
struct NvLinkGroupsParams {
    NvLinkDispatchParams sent;
    const int32_t* kept;       // [T, K]
    int64_t top_k;
    int64_t local_experts;     // of a rank
    int64_t group_experts;     // of a group
    int64_t groups;
};

// Slots back to their tokens.
struct NvLinkCombineParams {
    NvLinkCall call;
    const void* rows;          // [N, width]
    int64_t width;             // elements
    int64_t word;              // bytes that a row is moved in: 16, or those of an element
    int64_t in_k_order;        // every slot's row travels, and the token's rank adds them in the order of k
    const float* weights;      // [N]; null: zeros, where out_weights is wanted
    int64_t with_weights;      // whether weights travel
    int64_t weights_at;        // where they lie in the zone: [T, K]
    void* out;                 // [T, width]
    float* out_weights;        // [T, K], or null
    const int32_t* token_rows; // [T, R]
    const int32_t* row_slots;  // [R, max_tokens, K]: slots of each row that arrived in dispatch, or -1
    const int32_t* row_tokens; // [R, max_tokens]: its token there
    const int32_t* kept;       // [T, K]
    const int64_t* arrived;    // [R]: rows that arrived from each rank
    int64_t tokens;
    int64_t max_tokens;
    int64_t top_k;
    int64_t lag;               // rows that are sent ahead of the tokens that are summed
    int64_t scales_at;         // sums that travel quantized: where their scales lie in the zone, and bytes of a row's
    int64_t scale_bytes;
};

// Calls of low latency (nvlink_low_latency.cuh): bytes of a packet and of what it carries, threads of a block, and blocks
// of an SM that run at once.
constexpr uint32_t PACKET_BYTES = 16, PACKET_PAYLOAD = 14, LOW_LATENCY_THREADS = 256, LOW_LATENCY_BLOCKS = 3;

// Control words of a rank for them, of 8 bytes; zeros at first.
enum LowLatencyWord : int {
    LOW_LATENCY_EPOCH = 0,     // calls that this rank has ended, in 32 bits, without those whose lower half is 0
    LOW_LATENCY_BLOCKS_ENDED = 1, // blocks of the present call that have ended
    LOW_LATENCY_ABSENT = 2,    // a bit for each rank that this one goes on without
    LOW_LATENCY_LATE = 3,      // a bit for each that it has begun to go on without since the host last asked
    LOW_LATENCY_LOST = 4,      // the last call that has lost a rank on which it had counted
    LOW_LATENCY_RETURNED = 5,  // the last prepare in which this rank has counted on one again that it had gone on without
    LOW_LATENCY_CAME = 6,      // a bit for each rank that has come to the last prepare, though the two do not count on each other
    LOW_LATENCY_SENT = 8,      // [NVLINK_RANKS]: the last call in which this rank may have sent to rank r, while it goes on without it
    LOW_LATENCY_HEADERS = 16,  // [2, NVLINK_RANKS] packets: rank r has come to the call of this epoch, in its bank
    LOW_LATENCY_RETURNS = 48,  // [NVLINK_RANKS]: rank r waits for a prepare of this layer, plus one, to come back
    LOW_LATENCY_WORDS = 64
};

// A rank's part in such a call.
struct LowLatencyCall {
    NvLinkCall call;           // its zones: two banks of packets each, of an area for each rank; in that of its own a rank has
                               // the epoch of the bank's last call
    int64_t control;           // where in the ranks' words those of low latency begin
    int64_t area;              // packets of each rank in a bank
    int64_t patience;          // ns after which the call goes on without a rank; 0: it gives up after the call's timeout
};

// Tokens to the ranks that keep a choice of theirs. Of a part `at` is not used.
struct LowLatencyDispatchParams {
    LowLatencyCall call;
    NvLinkPart rows;
    NvLinkPart weights;
    NvLinkPart scales;
    void* out_rows;            // [R, max_tokens, bytes], as the other two
    void* out_weights;
    void* out_scales;
    const int32_t* token_rows; // as in the maps of zones above
    const int32_t* row_tokens;
    const int64_t* arrived;
    int64_t tokens;
    int64_t max_tokens;        // rows of a message at most, as the maps count them
};

// Slots back to their tokens.
struct LowLatencyCombineParams {
    LowLatencyCall call;
    const void* rows;          // [N, width]
    void* out;                 // [T, width]
    int64_t width;             // elements
    int64_t slots;             // N
    const int32_t* token_rows;
    const int32_t* row_slots;
    const int64_t* arrived;
    int64_t tokens;
    int64_t max_tokens;
    int64_t top_k;
};

// The ranks' records, with patience.
struct LowLatencyExchangeParams {
    LowLatencyCall call;       // its zones: two banks of packets of records each
    int64_t layer;             // the prepare's
    const void* source;
    int64_t bytes;             // a multiple of 4
    void* out;                 // [R, bytes]
};
