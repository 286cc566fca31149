// usage: low_latency LIBRARY NAME [SEED]: runs what has this name over the kernels of a library.
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>

#include "cases.hpp"
#include "ranks.hpp"

namespace {

// Calls of the others within which a rank is back that has been away, however long that was: until tags do not come again
// soon, and until what lies in its own memory is cleared.
constexpr uint32_t BACK_WITHIN = 16384 + 64;

// Ranks that stay away: in the midst of a call, or between two steps.
struct Absence {
    int ranks, layers;
    uint32_t late;    // a bit for each that is away
    int call;         // 0: between steps, 1: in a prepare, 2: in a dispatch, 3: in a combine
    uint32_t calls;   // that the others make meanwhile
    bool lockstep;    // then all wait for each other after each step
    uint32_t seed;
    uint32_t slowness = 1;  // of those that stay
    uint32_t uses = 1;      // dispatches and combines of a prepare's handle

    std::string name() const {
        return std::to_string(ranks) + " ranks, late " + std::to_string(late) + ", in call " + std::to_string(call) + ", " +
               std::to_string(calls) + " calls away, " + std::to_string(layers) + " layers, " + (lockstep ? "in lockstep" : "free") +
               ", slowness " + std::to_string(slowness) + ", " + std::to_string(uses) + " uses of a handle, seed " + std::to_string(seed);
    }
};

// Returns the calls of the others until all were back.
uint32_t be_away(const std::string& library, const Absence& away) {
    Group group(away.ranks, away.layers, library, away.seed);
    group.name = away.name();
    group.uses = away.uses;
    auto is_late = [&](int rank) { return away.late >> rank & 1; };
    const int ranks = away.ranks, one = is_late(0) ? (is_late(1) ? 2 : 1) : 0;
    for (int i = 0; i < 12; i++) {
        group.step();
        if (!group.whole()) fail(group.name + ": all are there");
    }
    for (int r = 0; r < ranks; r++) {
        if (group.told(r) != 0) fail(group.name + ": a rank is told of as late that is there");
    }
    const uint32_t began = group.epoch(one);
    for (int r = 0; r < ranks; r++) {
        Gpu& gpu = group.gpu(r);
        if (!is_late(r)) group.allow(r, ~0ull);
        else if (away.call != 0) {
            group.allow(r, ~0ull);
            gpu.stall_in = gpu.launched + away.call, gpu.stall_after = 1 + group.random()() % 300;
        }
    }
    group.run([&] { return group.epoch(one) - began >= away.calls; });
    // They end the same step, and the others the one that they have stalled in.
    uint64_t last = 0;
    for (int r = 0; r < ranks; r++) {
        if (is_late(r) && away.call != 0 && !group.gpu(r).stalled) fail(group.name + ": it did not stall");
        if (!is_late(r)) last = std::max(last, group.steps(r) + 1);
    }
    for (int r = 0; r < ranks; r++) group.allow(r, is_late(r) ? group.steps(r) : last);
    group.run([&] {
        for (int r = 0; r < ranks; r++) {
            if (!is_late(r) && !group.rests(r)) return false;
        }
        return true;
    });
    for (int r = 0; r < ranks; r++) {
        group.gpu(r).stalled = false;
        group.longest(r);
        if (!is_late(r)) group.slow(r, away.slowness);
    }
    if (away.lockstep) group.rest();
    const uint32_t back_from = group.epoch(one);
    if (!away.lockstep) {
        for (int r = 0; r < ranks; r++) group.allow(r, ~0ull);
        // As far as this has been seen.
        group.run([&] { return group.whole() || group.epoch(one) - back_from > 2 * BACK_WITHIN; });
    } else {
        while (!group.whole() && group.epoch(one) - back_from <= 2 * BACK_WITHIN) {
            group.step();
            group.check();
        }
    }
    const uint32_t took = group.epoch(one) - back_from;
    for (int r = 0; r < ranks; r++) {
        // A step of many uses takes as long by itself.
        if (!is_late(r) && away.uses == 1 && group.longest(r) >= PATIENCE) fail(group.name + ": a rank that stayed has waited in vain");
        group.slow(r, 1);
    }
    if (!group.whole()) fail(group.name + ": not back within " + std::to_string(took) + " calls");
    group.rest();
    group.check();
    // They stay together, and nobody is told of any more.
    for (int i = 0; i < 4; i++) group.step();
    group.forget_told();
    for (int i = 0; i < 20; i++) {
        group.step();
        if (!group.whole()) fail(group.name + ": back, and gone on without again");
    }
    for (int r = 0; r < ranks; r++) {
        if (group.told(r) != 0) fail(group.name + ": told of one that is back");
    }
    group.check();
    return took;
}

constexpr uint32_t ROUND = 65534;  // calls of other tags

// In lockstep, behind absences at whose end the tags of before come again soon.
void back_in_lockstep(const std::string& library, uint32_t seed) {
    const struct {
        int ranks, call;
        uint32_t calls;
    } cases[] = {{2, 0, 49200}, {2, 1, 57000}, {2, 2, ROUND - 12}, {2, 3, 2 * ROUND - 9000}, {3, 1, 58000}, {4, 3, 60000}};
    for (const auto& [ranks, call, calls] : cases) {
        const Absence absence{ranks, 1, 1u << (ranks - 1), call, calls, true, seed + call};
        const uint32_t took = be_away(library, absence);
        printf("%s: back within %u calls\n", absence.name().c_str(), took);
        if (took > BACK_WITHIN) fail(absence.name() + ": that is too many");
    }
}

// Two of four at the same time, which go on with each other.
void two_back_in_lockstep(const std::string& library, uint32_t seed) {
    for (int call = 0; call <= 3; call += 3) {
        const Absence absence{4, 1, 0b1010, call, 58000 + 1000 * static_cast<uint32_t>(call), true, seed + call};
        const uint32_t took = be_away(library, absence);
        printf("%s: back within %u calls\n", absence.name().c_str(), took);
        if (took > BACK_WITHIN) fail(absence.name() + ": that is too many");
    }
}

// A combine's packets of before have the tag of the first dispatch behind the return, or of one close to it: a round of tags is
// two calls more than a multiple of a step's. Without the look at tags the second of these takes them.
void back_behind_a_round(const std::string& library, uint32_t seed) {
    for (uint32_t before = 0; before <= 6; before += 3) {
        const Absence absence{2, 1, 2, 3, ROUND - before, true, seed};
        printf("%s: back within %u calls\n", absence.name().c_str(), be_away(library, absence));
    }
}

// A bank of prepares has a call every second one: more calls lie between than a bank may rest for behind a return.
void back_with_kept_handles(const std::string& library, uint32_t seed) {
    constexpr uint32_t USES = 2100, STEP = 1 + 2 * USES;
    const Absence absence{2, 1, 2, 0, 9000, true, seed, 1, USES};
    const uint32_t took = be_away(library, absence);
    printf("%s: back within %u calls\n", absence.name().c_str(), took);
    if (took > 2 * STEP) fail(absence.name() + ": that is too many");
}

// Others are slower, and layers many: nobody waits for a rank in vain that returns, nor is it ahead of them.
void back_among_slower(const std::string& library, uint32_t seed) {
    for (int ranks = 2; ranks <= 4; ranks++) {
        const Absence absence{ranks, 3, 2, 2, 12000, false, seed, 4};
        const uint32_t took = be_away(library, absence);
        printf("%s: back within %u calls\n", absence.name().c_str(), took);
        // A layer of three takes nine calls a step: it is back in the second or third.
        if (took > 20) fail(absence.name() + ": that is too many");
    }
}

// Behind short absences and long ones, as fast as each rank can.
void back_as_they_go(const std::string& library, uint32_t seed) {
    const uint32_t away[] = {30, 300, 9000, 48000, 60000, ROUND - 3, ROUND + 2, 70000};
    for (uint32_t calls : away) {
        const int ranks = calls > 9000 ? 2 + static_cast<int>(calls % 2) : 4, call = static_cast<int>((calls / 7 + seed) % 4);
        const Absence absence{ranks, 1, 1u << (seed % ranks), call, calls, false, seed + calls};
        printf("%s: back within %u calls\n", absence.name().c_str(), be_away(library, absence));
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3) fail("usage: low_latency LIBRARY NAME [SEED]");
    const std::string library = arguments[1], name = arguments[2];
    const uint32_t seed = count > 3 ? static_cast<uint32_t>(strtoul(arguments[3], nullptr, 10)) : 1;
    if (name == "back_in_lockstep") back_in_lockstep(library, seed);
    else if (name == "two_back_in_lockstep") two_back_in_lockstep(library, seed);
    else if (name == "back_as_they_go") back_as_they_go(library, seed);
    else if (name == "back_behind_a_round") back_behind_a_round(library, seed);
    else if (name == "back_with_kept_handles") back_with_kept_handles(library, seed);
    else if (name == "back_among_slower") back_among_slower(library, seed);
    else if (name == "tags_of_one_half") tags_of_one_half(library, seed);
    else if (name == "ranks_ahead") ranks_ahead(library, seed);
    else if (name == "rows_of_one_batch") rows_of_one_batch(library, seed);
    else if (name == "lost_in_a_sweep") lost_in_a_sweep(library, seed);
    else if (name == "late_to_one_call") late_to_one_call(library, seed);
    else if (name == "few_rows_back") few_rows_back(library, seed);
    else if (name == "records_in_part") records_in_part(library, seed);
    else if (name == "gone_for_good") gone_for_good(library, seed);
    else if (name == "away" && count == 11) {
        int n[8];
        for (int i = 0; i < 8; i++) n[i] = atoi(arguments[3 + i]);
        const Absence absence{n[0], n[1], static_cast<uint32_t>(n[2]), n[3], static_cast<uint32_t>(n[4]), n[5] != 0, static_cast<uint32_t>(n[6]), static_cast<uint32_t>(n[7])};
        printf("%s: back within %u calls\n", absence.name().c_str(), be_away(library, absence));
    } else fail("nothing is called " + name);
}
