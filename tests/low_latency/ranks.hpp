// Ranks that step: prepare, dispatch and combine of low latency over NVLink, each of whose results is compared with what was
// sent in that call.
#pragma once
#include <functional>
#include <unordered_map>
#include <utility>

#include "common/record_layout.h"
#include "fibers.hpp"

// Time that a rank is waited for: more than a step takes of a group that is there.
constexpr int64_t PATIENCE = 30000;

class Group {
  public:
    Group(int ranks, int layers, const std::string& library, uint32_t seed);

    // Lets all go on until this holds.
    template <class Until>
    void run(Until&& until) {
        for (uint64_t idle = 0; !until(); idle++) {
            if (idle > 4000000000) fail(name + ": the ranks do not go on");
            Rank& rank = *ranks_[random_() % ranks_.size()];
            if (rank.slowness == 1 || random_() % rank.slowness == 0) rank.gpu.go_on(random_);
        }
    }
    // Each makes so many steps more, as soon as it can.
    void allow(uint64_t steps);
    // Ends the step that each rank is in.
    void rest() {
        allow(0);
        run([&] { return all_have_stepped(); });
    }
    // All make a step and wait for each other.
    void step() {
        allow(1);
        run([&] { return all_have_stepped(); });
    }
    bool all_have_stepped() const;
    // Whether a rank has ended its steps.
    bool rests(int rank) const { return ranks_[rank]->steps >= ranks_[rank]->allowed && !ranks_[rank]->stepping; }
    // Whether the last step of each rank had the share of all.
    bool whole() const;
    // Nothing was taken for what it is not, in calls that both have ended.
    void check();

    int ranks() const { return static_cast<int>(ranks_.size()); }
    Gpu& gpu(int rank) { return ranks_[rank]->gpu; }
    uint32_t epoch(int rank) const { return static_cast<uint32_t>(word(rank, LOW_LATENCY_EPOCH)); }
    void allow(int rank, uint64_t steps) { ranks_[rank]->allowed = steps; }
    uint64_t steps(int rank) const { return ranks_[rank]->steps; }
    // The ranks whose share the last step of a rank had.
    uint32_t shares(int rank) const { return ranks_[rank]->shares; }
    // Ranks that a host was told of so far.
    uint32_t told(int rank) const { return ranks_[rank]->told; }
    void forget_told() {
        for (auto& rank : ranks_) rank->told = 0;
    }
    // A rank that runs at a part of the others' speed.
    void slow(int rank, uint32_t slowness) { ranks_[rank]->slowness = slowness; }
    // The most turns that a step of a rank took since this was last asked.
    uint64_t longest(int rank) { return std::exchange(ranks_[rank]->longest, 0); }
    unsigned long long& word(int rank, int number) const;
    std::mt19937& random() { return random_; }

    // Whether a packet of rows in a rank's memory is what another has sent in this call.
    bool holds(int rank, int from, uint32_t epoch, int packet) const;

    std::string name = "ranks";
    uint32_t uses = 1;     // dispatches and combines of a prepare
    uint32_t batches = 1;  // prepares of a step; then come all of their dispatches, then all of their combines
    // A bit for each rank that keeps a choice of a token, of a rank's prepare of this number.
    std::function<uint32_t(int rank, uint32_t prepare, int token)> choices = [](int, uint32_t, int) { return ~0u; };

  private:
    // What a prepare has told a rank: the tokens of each rank whose rows come here, in the order of the rows.
    struct Handle {
        uint32_t id;
        std::vector<std::vector<int>> rows;
        std::vector<int64_t> arrived;
    };
    // What a rank has taken for another's part in a call.
    struct Taken {
        uint32_t epoch, id;
        int from;
    };
    struct Rank {
        explicit Rank(const std::string& library) : gpu(library) {}

        Gpu gpu;
        std::vector<uint4> words, rows;
        std::vector<Taken> taken;
        std::unordered_map<uint32_t, uint32_t> sent;  // the step that this rank's part in a call was of
        uint64_t steps = 0, allowed = 0, longest = 0;
        uint32_t slowness = 1;
        bool stepping = false;
        uint32_t shares = 0, told = 0;
        uint32_t known = 0;  // of those whose share is missing, who its host was told of
        unsigned long long fault = 0;
    };

    void make_step(int rank);
    NvLinkCall call_of(int rank, bool records);
    LowLatencyCall low_latency(int rank, bool records);
    Handle exchange(int rank, uint32_t id, uint32_t layer);
    std::vector<uint8_t> dispatch(int rank, const Handle& handle);
    uint32_t combine(int rank, const Handle& handle, const std::vector<uint8_t>& arrived_rows);
    std::vector<int> rows_of(uint32_t id, int to) const;
    std::vector<int32_t> token_rows_of(uint32_t id) const;
    void take_rows(int rank, int from, const std::vector<int>& tokens, const uint8_t* rows);
    void expect_noted(int rank, int missing, const char* what) const;
    void note(int rank, uint32_t id) { ranks_[rank]->sent[epoch(rank)] = id; }

    std::vector<std::unique_ptr<Rank>> ranks_;
    int layers_;
    std::mt19937 random_;
};
