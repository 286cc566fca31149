#include "cases.hpp"

#include <stdio.h>

#include "ranks.hpp"

namespace {

std::string named(const char* what, int ranks, uint32_t seed) {
    return std::string(what) + ", " + std::to_string(ranks) + " ranks, seed " + std::to_string(seed);
}

// Nobody has gone on without another.
void expect_none_late(const Group& group) {
    for (int r = 0; r < group.ranks(); r++) {
        if (group.told(r) != 0) fail(group.name + ": a rank is told of as late that is there");
    }
}
void expect_all(const Group& group) {
    expect_none_late(group);
    if (!group.whole()) fail(group.name + ": all are there");
}

// Packets are seen in any order.
void unorder(Group& group) {
    for (int r = 0; r < group.ranks(); r++) group.gpu(r).in_order = false;
}

}  // namespace

// Rows go in every 85th step. What a dispatch has left is where a combine receives 256 calls later, whose tag has the
// same lower half. Tags of neighboring steps' records have the same upper half. One rank is slow, so that others look
// before its packets come. The first calls of all clear the whole of so small a bank, so they have no rows.
void tags_of_one_half(const std::string& library, uint32_t seed) {
    constexpr uint32_t BETWEEN = 85, FIRST = 10;
    static_assert(3 * BETWEEN + 1 == 256, "a step is three calls, a combine the one behind a dispatch");
    for (int ranks = 2; ranks <= 4; ranks++) {
        Group group(ranks, 1, library, seed);
        group.name = named("tags of one half", ranks, seed);
        unorder(group);
        group.choices = [](int, uint32_t prepare, int) { return prepare % BETWEEN == FIRST ? ~0u : 0; };
        group.slow(1, 4);
        for (uint32_t i = 0; i <= 3 * BETWEEN + FIRST; i++) {
            group.step();
            group.check();
        }
        expect_all(group);
    }
}

namespace {

// Steps in which nobody waits for a rank's host, while one rank is slower than the others.
void run_freely(Group& group, uint32_t slowness, uint64_t steps) {
    for (int slow = 0; slow < group.ranks(); slow++) {
        group.slow(slow, slowness);
        group.allow(steps);
        group.run([&] {
            expect_none_late(group);
            return group.all_have_stepped();
        });
        group.slow(slow, 1);
        group.check();
        expect_all(group);
    }
}

}  // namespace

// A rank that has all that it waits for makes its next call, while the others are in this one: it stores to the other
// bank.
void ranks_ahead(const std::string& library, uint32_t seed) {
    for (int ranks = 2; ranks <= 4; ranks++) {
        Group group(ranks, 1, library, seed);
        group.name = named("ranks ahead", ranks, seed);
        unorder(group);
        group.uses = 4;
        run_freely(group, 6, 8);
    }
}

// Two prepares, then both dispatches and both combines, of which the second have no rows. So in the second dispatch a
// rank is sent nothing by those that may still read what the first combine stores over: it waits for their headers
// alone.
void rows_of_one_batch(const std::string& library, uint32_t seed) {
    for (int ranks = 2; ranks <= 4; ranks++) {
        Group group(ranks, 1, library, seed);
        group.name = named("rows of one batch", ranks, seed);
        unorder(group);
        group.uses = 4, group.batches = 2;
        group.choices = [](int, uint32_t prepare, int) { return prepare % 2 == 0 ? ~0u : 0; };
        run_freely(group, 6, 8);
    }
}

// A dispatch clears the part of its bank where a packet of an earlier one lies, but for what the other rank is to store
// over it: and that rank is late. So the call is not to count, for the bank's next call to clear the part. Blocks begin
// at different times. Where the second one loses the rank, the first sees that, and counts the call, as it waits for a
// header too: however long the second one's store takes.
void lost_in_a_sweep(const std::string& library, uint32_t seed) {
    // The dispatches of steps 0 and 2, of the same bank; the latter clears packet 4 of each area, which is one of its
    // second row.
    constexpr uint32_t BEFORE = 2, LOST = 8;
    constexpr int PACKET = LOST / 2;
    for (uint32_t trial = 0; trial < 40; trial++) {
        Group group(2, 1, library, seed + trial);
        group.name = named("lost in a sweep", 2, seed + trial);
        unorder(group);
        group.gpu(0).word_delay = 256, group.gpu(0).block_delay = 32;
        group.choices = [](int, uint32_t prepare, int token) {
            return prepare == 0 || (prepare == 2 && token < 2) ? ~0u : 0;
        };
        for (int i = 0; i < 2; i++) group.step();
        expect_all(group);
        if (!group.holds(0, 1, BEFORE, PACKET)) fail(group.name + ": nothing is left over");
        group.gpu(1).stall_in = group.gpu(1).launched + 2, group.gpu(1).stall_after = 1;
        group.allow(1);
        group.run([&] { return group.rests(0); });
        if (group.epoch(0) != LOST + 1 || (group.told(0) & 2) == 0) fail(group.name + ": the other rank is not lost");
        // The combine of one more step is the bank's next call.
        group.allow(0, group.steps(0) + 1);
        group.run([&] { return group.rests(0); });
        if (group.holds(0, 1, BEFORE, PACKET)) {
            fail(group.name + ": a packet is left over of a call that has lost a rank");
        }
    }
}

namespace {

// All make a step, in one call of which a rank comes when the others have gone on without it, and before they have
// ended the next.
void miss_call(Group& group, int late, int call) {
    Gpu& gpu = group.gpu(late);
    gpu.stall_in = gpu.launched + static_cast<uint64_t>(call), gpu.stall_after = 1;
    const uint32_t ends = group.epoch(late) + static_cast<uint32_t>(call);
    group.allow(1);
    group.run([&] {
        for (int r = 0; r < group.ranks(); r++) {
            if (r != late && static_cast<int32_t>(group.epoch(r) - ends) < 0) return false;
        }
        return true;
    });
    gpu.stalled = false;
    group.rest();
}

}  // namespace

// A rank is late to a dispatch or a combine, and in time again for the next prepare, which so has nothing to note.
void late_to_one_call(const std::string& library, uint32_t seed) {
    for (int trial = 0; trial < 12; trial++) {
        const int ranks = 2 + trial % 3, call = 2 + trial / 3 % 2, late = trial % ranks;
        Group group(ranks, 1, library, seed + static_cast<uint32_t>(trial));
        const char* what = call == 2 ? "late to a dispatch" : "late to a combine";
        group.name = named(what, ranks, seed + static_cast<uint32_t>(trial));
        unorder(group);
        for (int i = 0; i < 4; i++) group.step();
        expect_all(group);
        miss_call(group, late, call);
        for (int r = 0; r < ranks; r++) {
            if (r != late && (group.told(r) >> late & 1) == 0) fail(group.name + ": the host is not told of it");
        }
        for (int i = 0; i < 8; i++) group.step();
        group.forget_told();
        for (int i = 0; i < 4; i++) group.step();
        group.check();
        expect_all(group);
    }
}

// Of three tokens one has a row that comes back. The combine clears a packet behind that row which lies before three
// tokens' end.
void few_rows_back(const std::string& library, uint32_t seed) {
    // The dispatch of step 0, and the combine of step 1, of the same bank, which clears packet 3 of each area.
    constexpr uint32_t BEFORE = 2, CLEARS = 6;
    constexpr int PACKET = CLEARS / 2;
    Group group(2, 1, library, seed);
    group.name = named("few rows back", 2, seed);
    unorder(group);
    group.choices = [](int, uint32_t prepare, int token) { return prepare == 0 || token == 0 ? ~0u : 0; };
    group.step();
    if (!group.holds(0, 1, BEFORE, PACKET)) fail(group.name + ": nothing is left over");
    group.step();
    group.check();
    expect_all(group);
    if (group.epoch(0) != CLEARS) fail(group.name + ": a step is not three calls");
    if (group.holds(0, 1, BEFORE, PACKET)) fail(group.name + ": a packet behind the rows is left over");
}

// A rank stalls while its record is on its way, of which a part comes: the others take none of it.
void records_in_part(const std::string& library, uint32_t seed) {
    for (uint32_t trial = 0; trial < 16; trial++) {
        Group group(2, 1, library, seed + trial);
        group.name = named("records in part", 2, seed + trial);
        unorder(group);
        for (int i = 0; i < 4; i++) group.step();
        expect_all(group);
        Gpu& gpu = group.gpu(1);
        // Some rounds of its threads' turns: the stores are in one of them.
        gpu.stall_in = gpu.launched + 1, gpu.stall_after = Gpu::THREADS * (1 + trial / 2) - 1;
        group.allow(1);
        group.run([&] { return group.rests(0); });
        // It ends its call, of which all may have come too.
        gpu.stall_in = 0, gpu.stalled = false;
        group.rest();
        group.check();
    }
}

// Two ranks go on without a third for more than half of all numbers of calls, past which its last header would be of a
// call to come. They get there in jumps, behind each of which what is in their own memory has rested for too long once.
void gone_for_good(const std::string& library, uint32_t seed) {
    constexpr uint32_t JUMP = 0x20000000, JUMPS = 5;
    Group group(3, 1, library, seed);
    group.name = named("gone for good", 3, seed);
    unorder(group);
    for (int i = 0; i < 4; i++) group.step();
    expect_all(group);
    auto step = [&](uint64_t steps) {
        for (int r = 0; r < 2; r++) group.allow(r, group.steps(r) + steps);
        group.run([&] { return group.rests(0) && group.rests(1); });
    };
    for (uint32_t jump = 0; jump < JUMPS; jump++) {
        step(8);
        for (int r = 0; r < 2; r++) group.word(r, LOW_LATENCY_EPOCH) = group.epoch(r) + JUMP;
        step(8);
        for (int r = 0; r < 2; r++) group.longest(r);
        group.forget_told();
        step(8);
        for (int r = 0; r < 2; r++) {
            if (group.longest(r) >= PATIENCE) fail(group.name + ": the rank that is gone is waited for");
            if (group.shares(r) != 3) fail(group.name + ": the two are not together");
        }
        expect_none_late(group);
    }
}
