#include "ranks.hpp"

#include <algorithm>

namespace {

// Tokens of a rank. A record: the words of a header, and the number of its step; a packet for each thread of a block, which
// is the most that there may be. A token's row is three packets, each of which has the step's number and its own place; of the
// way back a packet for each rank.
constexpr int TOKENS_HERE = 3, RECORD_BYTES = Gpu::THREADS * static_cast<int>(PACKET_PAYLOAD), PIECES = 3;
constexpr int ROW_BYTES = PIECES * static_cast<int>(PACKET_PAYLOAD);
static_assert(RECORD_BYTES >= (HEADER_WORDS + 1) * 8);
constexpr int RECORD_PACKETS = (RECORD_BYTES + static_cast<int>(PACKET_PAYLOAD) - 1) / static_cast<int>(PACKET_PAYLOAD);
constexpr int CONTROL = (NVLINK_ROWS + 8) * 8, OF_RECORDS = CONTROL + LOW_LATENCY_WORDS * 8;
constexpr uint8_t NOTHING = 0xee;

int row_packets(int ranks) { return std::max(PIECES, ranks); }

struct Piece {
    uint32_t id;
    uint16_t token, piece;
    uint8_t filling[6];
};
Piece piece_of(uint32_t id, int token, int piece) {
    Piece made{id, static_cast<uint16_t>(token), static_cast<uint16_t>(piece), {}};
    for (int i = 0; i < 6; i++) made.filling[i] = static_cast<uint8_t>(id * 31 + token * 7 + piece * 5 + i);
    return made;
}

}  // namespace

Group::Group(int ranks, int layers, const std::string& library, uint32_t seed) : layers_(layers), random_(seed) {
    for (int r = 0; r < ranks; r++) {
        ranks_.push_back(std::make_unique<Rank>(library));
        ranks_[r]->words.resize(OF_RECORDS / 16 + 2 * ranks * RECORD_PACKETS);
        ranks_[r]->rows.resize(2 * ranks * TOKENS_HERE * row_packets(ranks));
        ranks_[r]->gpu.host([this, r] {
            Rank& rank = *ranks_[r];
            for (;;) {
                while (rank.steps >= rank.allowed) emulated::yield();
                rank.stepping = true;
                const uint64_t began = turns();
                make_step(r);
                rank.longest = std::max(rank.longest, turns() - began);
                rank.steps++;
                rank.stepping = false;
            }
        });
    }
}

void Group::allow(uint64_t steps) {
    for (auto& rank : ranks_) rank->allowed = rank->steps + steps;
}

bool Group::all_have_stepped() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->steps >= rank->allowed && !rank->stepping; });
}

bool Group::whole() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& rank) { return rank->shares == (1u << ranks_.size()) - 1; });
}

unsigned long long& Group::word(int rank, int number) const {
    return reinterpret_cast<unsigned long long*>(ranks_[rank]->words.data())[CONTROL / 8 + number];
}

void Group::check() {
    for (auto& rank : ranks_) {
        for (const Taken& taken : rank->taken) {
            const auto& sent = ranks_[taken.from]->sent;
            const auto found = sent.find(taken.epoch);
            if (found != sent.end() && found->second == taken.id) continue;
            fail(name + ": in call " + std::to_string(taken.epoch) + " a part of rank " + std::to_string(taken.from) + "'s step " +
                 std::to_string(taken.id & 0xffffff) + " was taken for that of " + (found == sent.end() ? "none" : std::to_string(found->second & 0xffffff)));
        }
        rank->taken.clear();
    }
}

NvLinkCall Group::call_of(int rank, bool records) {
    NvLinkCall call{};
    call.rank = rank, call.ranks = ranks();
    for (int r = 0; r < ranks(); r++) {
        call.words[r] = reinterpret_cast<unsigned long long>(ranks_[r]->words.data());
        call.zones[r] = records ? call.words[r] : reinterpret_cast<unsigned long long>(ranks_[r]->rows.data());
    }
    call.zone = records ? OF_RECORDS : 0;
    call.timeout = PATIENCE;
    call.fault = &ranks_[rank]->fault;
    return call;
}

LowLatencyCall Group::low_latency(int rank, bool records) {
    return {call_of(rank, records), CONTROL, records ? RECORD_PACKETS : TOKENS_HERE * row_packets(ranks()), PATIENCE};
}

void Group::make_step(int r) {
    Rank& rank = *ranks_[r];
    std::vector<Handle> handles;
    for (uint32_t i = 0; i < batches; i++) {
        const auto prepare = static_cast<uint32_t>(rank.steps * batches + i);
        handles.push_back(exchange(r, static_cast<uint32_t>(r + 1) << 24 | (prepare & 0xffffff), prepare % layers_));
    }
    for (uint32_t i = 0; i < uses; i++) {
        std::vector<std::vector<uint8_t>> rows;
        for (const Handle& handle : handles) rows.push_back(dispatch(r, handle));
        uint32_t shares = (1u << ranks()) - 1;
        for (uint32_t j = 0; j < batches; j++) shares &= combine(r, handles[j], rows[j]);
        rank.shares = shares;
    }
    const auto told = static_cast<uint32_t>(atomicExch(&word(r, LOW_LATENCY_LATE), 0));
    const uint32_t missing = ((1u << ranks()) - 1) & ~rank.shares;
    if (missing & ~(rank.known | told)) fail(name + ": the share of a rank is missing of which the host was not told");
    rank.known = (rank.known & missing) | told;
    rank.told |= told;
    if (rank.fault != 0) fail(name + ": a fault");
}

// The tokens of a prepare whose rows go to a rank.
std::vector<int> Group::rows_of(uint32_t id, int to) const {
    std::vector<int> tokens;
    for (int token = 0; token < TOKENS_HERE; token++) {
        if (choices(static_cast<int>(id >> 24) - 1, id & 0xffffff, token) >> to & 1) tokens.push_back(token);
    }
    return tokens;
}

// What is missing of a rank in a call is noted there, not only in the next prepare.
void Group::expect_noted(int rank, int missing, const char* what) const {
    if ((word(rank, LOW_LATENCY_ABSENT) >> missing & 1) != 0) return;
    fail(name + ": " + what + " of rank " + std::to_string(missing) + " is missing, which is not noted");
}

Group::Handle Group::exchange(int r, uint32_t id, uint32_t layer) {
    Rank& rank = *ranks_[r];
    std::vector<uint32_t> own(RECORD_BYTES / 4, id), all(ranks() * RECORD_BYTES / 4);
    reinterpret_cast<uint64_t*>(own.data())[KIND] = 7;
    reinterpret_cast<uint64_t*>(own.data())[TOKENS] = TOKENS_HERE;
    const LowLatencyExchangeParams p{low_latency(r, true), layer, own.data(), RECORD_BYTES, all.data()};
    rank.gpu.launch(1, [&](int block) { rank.gpu.kernels(block).exchange(p); });
    note(r, id);
    Handle handle{id, std::vector<std::vector<int>>(ranks()), std::vector<int64_t>(ranks())};
    for (int from = 0; from < ranks(); from++) {
        const uint32_t* record = all.data() + from * RECORD_BYTES / 4;
        if (reinterpret_cast<const int64_t*>(record)[TOKENS] == 0) continue;
        const uint32_t taken = record[RECORD_BYTES / 4 - 1];
        auto expected = own;
        for (uint32_t& word : expected) word = word == id ? taken : word;
        if (memcmp(record, expected.data(), RECORD_BYTES) != 0) fail(name + ": a record is of several steps");
        rank.taken.push_back({epoch(r), taken, from});
        handle.rows[from] = rows_of(taken, r);
        handle.arrived[from] = static_cast<int64_t>(handle.rows[from].size());
    }
    return handle;
}

// The rows that have come, from each rank those of its tokens.
std::vector<uint8_t> Group::dispatch(int r, const Handle& handle) {
    Rank& rank = *ranks_[r];
    std::vector<uint8_t> sent(TOKENS_HERE * ROW_BYTES), out(ranks() * TOKENS_HERE * ROW_BYTES, NOTHING);
    std::vector<int32_t> row_tokens(ranks() * TOKENS_HERE);
    const auto token_rows = token_rows_of(handle.id);
    for (int to = 0; to < ranks(); to++) {
        const auto tokens = rows_of(handle.id, to);
        std::copy(tokens.begin(), tokens.end(), row_tokens.begin() + to * TOKENS_HERE);
    }
    for (int i = 0; i < TOKENS_HERE * PIECES; i++) {
        const Piece piece = piece_of(handle.id, i / PIECES, i % PIECES);
        memcpy(sent.data() + i * PACKET_PAYLOAD, &piece, PACKET_PAYLOAD);
    }
    LowLatencyDispatchParams p{};
    p.call = low_latency(r, false);
    p.rows = {sent.data(), ROW_BYTES, 2, 0};
    p.out_rows = out.data();
    p.token_rows = token_rows.data(), p.row_tokens = row_tokens.data(), p.arrived = handle.arrived.data();
    p.tokens = p.max_tokens = TOKENS_HERE;
    rank.gpu.launch(Gpu::BLOCKS, [&](int block) { rank.gpu.kernels(block).dispatch(p); });
    note(r, handle.id);
    for (int from = 0; from < ranks(); from++) {
        take_rows(r, from, handle.rows[from], out.data() + from * TOKENS_HERE * ROW_BYTES);
    }
    return out;
}

// Looks at the rows that have come from a rank.
void Group::take_rows(int r, int from, const std::vector<int>& tokens, const uint8_t* rows) {
    const std::vector<uint8_t> nothing(PACKET_PAYLOAD, NOTHING);
    for (int i = 0; i < TOKENS_HERE * PIECES; i++) {
        Piece piece;
        memcpy(&piece, rows + i * PACKET_PAYLOAD, PACKET_PAYLOAD);
        const bool comes = i / PIECES < static_cast<int>(tokens.size());
        if (memcmp(&piece, nothing.data(), PACKET_PAYLOAD) == 0) {
            if (comes) expect_noted(r, from, "a row");
            continue;
        }
        const Piece expected = piece_of(piece.id, comes ? tokens[i / PIECES] : -1, i % PIECES);
        if (!comes || memcmp(&piece, &expected, PACKET_PAYLOAD) != 0) {
            fail(name + ": a packet of another place, or of none");
        }
        ranks_[r]->taken.push_back({epoch(r), piece.id, from});
    }
}

// The row of each token at each rank, as both maps of a prepare number them; -1: it has none.
std::vector<int32_t> Group::token_rows_of(uint32_t id) const {
    std::vector<int32_t> token_rows(TOKENS_HERE * ranks(), -1);
    for (int to = 0; to < ranks(); to++) {
        int32_t row = 0;
        for (int token : rows_of(id, to)) token_rows[token * ranks() + to] = row++;
    }
    return token_rows;
}

// The ranks whose share has come back, for all tokens that they have.
uint32_t Group::combine(int r, const Handle& handle, const std::vector<uint8_t>& arrived_rows) {
    Rank& rank = *ranks_[r];
    const int width = 3 * ranks(), rows = ranks() * TOKENS_HERE;
    std::vector<float> made(rows * width), out(TOKENS_HERE * width, -1);
    std::vector<int32_t> row_slots(rows);
    const auto token_rows = token_rows_of(handle.id);
    for (int row = 0; row < rows; row++) {
        row_slots[row] = row;
        Piece of;
        memcpy(&of, arrived_rows.data() + row * ROW_BYTES, PACKET_PAYLOAD);
        // This rank's packet of the row tells what it is of.
        float* at = made.data() + row * width + 3 * r;
        at[0] = static_cast<float>((of.id & 0xffffff) + 1), at[1] = static_cast<float>(of.token + 1);
        at[2] = static_cast<float>(r + 1);
    }
    LowLatencyCombineParams p{};
    p.call = low_latency(r, false);
    p.rows = made.data(), p.out = out.data();
    p.width = width, p.slots = rows;
    p.token_rows = token_rows.data(), p.row_slots = row_slots.data(), p.arrived = handle.arrived.data();
    p.tokens = p.max_tokens = TOKENS_HERE, p.top_k = 1;
    rank.gpu.launch(Gpu::BLOCKS, [&](int block) { rank.gpu.kernels(block).combine(p); });
    note(r, handle.id);
    uint32_t shares = (1u << ranks()) - 1;
    for (int i = 0; i < TOKENS_HERE * ranks(); i++) {
        const int token = i / ranks(), from = i % ranks();
        const float* at = out.data() + token * width + 3 * from;
        const auto step = static_cast<float>((handle.id & 0xffffff) + 1);
        const float whole[3] = {step, static_cast<float>(token + 1), static_cast<float>(from + 1)};
        const bool comes = token_rows[i] >= 0;
        if (comes && std::equal(at, at + 3, whole)) continue;
        if (at[0] != 0 || at[1] != 0 || at[2] != 0) fail(name + ": a sum of rank " + std::to_string(from) + "'s that is of another step");
        if (!comes) continue;
        shares &= ~(1u << from);
        expect_noted(r, from, "a sum");
    }
    return shares;
}

bool Group::holds(int rank, int from, uint32_t epoch, int packet) const {
    const int area = TOKENS_HERE * row_packets(ranks());
    return ranks_[rank]->rows[((epoch & 1) * ranks() + from) * area + packet].w >> 16 == (epoch & 0xffff);
}
