#include "fibers.hpp"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

Index threadIdx, blockIdx, blockDim, gridDim;

void fail(const std::string& what) {
    fprintf(stderr, "%s\n", what.c_str());
    exit(1);
}

// A stack of its own, on which it runs one task after the other.
struct Fiber {
    explicit Fiber(Gpu* gpu) : gpu(gpu), stack(64 * 1024) {}

    Gpu* gpu;
    std::vector<char> stack;
    std::function<void()> task;
    bool begun = false, idle = true;
    int block = 0, thread = 0;
    // What it waits for: a count that is no longer this.
    const uint32_t* waits = nullptr;
    uint32_t until = 0;
    uint32_t met_block = 0, met_warp = 0;
    jmp_buf at;
};

namespace {

jmp_buf scheduler;
Fiber* current = nullptr;
uint64_t turns_so_far = 0;

void leave() {
    if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
    for (;;) {
        current->task();
        current->idle = true;
        leave();
    }
}

void resume(Fiber& fiber) {
    current = &fiber;
    turns_so_far++;
    threadIdx = {static_cast<uint32_t>(fiber.thread)}, blockIdx = {static_cast<uint32_t>(fiber.block)};
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.at, 1);
    fiber.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.data(), context.uc_stack.ss_size = fiber.stack.size();
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
}

// Waits until `count` fibers have come, and returns what they gave.
Meeting& meet(Meetings& meetings, uint32_t number, int count, int place, uint64_t value) {
    Meeting& here = meetings.of[number % 2];
    if (here.came == 0) here.held = 0;
    if (place < 32) here.values[place] = value;
    here.held += value != 0;
    if (++here.came == count) {
        here.came = 0;
        meetings.over++;
    } else {
        current->waits = &meetings.over, current->until = number;
        leave();
    }
    return here;
}

}  // namespace

uint64_t turns() { return turns_so_far; }

namespace emulated {

void yield() { leave(); }
uint64_t clock() { return turns_so_far; }
void store_later(void* at, uint4 packet) {
    current->gpu->packets_.push(at, &packet, sizeof packet, current->block);
}
void store_word_later(uint64_t* at, uint64_t value) {
    current->gpu->words_.push(at, &value, sizeof value, current->block);
}
uint64_t load_word(const uint64_t* at) {
    const void* own = current->gpu->words_.find(at, current->block);
    return *static_cast<const uint64_t*>(own == nullptr ? at : own);
}
void fence() { current->gpu->words_.perform_of(current->block); }
void settle(const void* at) { current->gpu->words_.perform_at(at); }

int meet_block(bool value) {
    Fiber& fiber = *current;
    return meet(fiber.gpu->blocks_[fiber.block], fiber.met_block++, Gpu::THREADS, Gpu::THREADS, value).held;
}
const uint64_t* meet_warp(uint64_t value) {
    Fiber& fiber = *current;
    return meet(fiber.gpu->warps_[fiber.block], fiber.met_warp++, 32, fiber.thread % 32, value).values;
}

}  // namespace emulated

Gpu::Gpu(const std::string& library) : host_(new Fiber(this)), blocks_(BLOCKS), warps_(BLOCKS) {
    for (int block = 0; block < BLOCKS; block++) {
        // A file of its own, as one that is loaded already is not loaded again.
        std::string copy = library + "XXXXXX";
        const int file = mkstemp(copy.data());
        std::error_code failed;
        std::filesystem::copy_file(library, copy, std::filesystem::copy_options::overwrite_existing, failed);
        if (file < 0 || failed) fail("no copy of " + library);
        close(file);
        void* loaded = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
        remove(copy.c_str());
        if (loaded == nullptr) fail(dlerror());
        kernels_.push_back(static_cast<const Kernels*>(dlsym(loaded, "kernels")));
    }
    for (int i = 0; i < BLOCKS * THREADS; i++) {
        fibers_.push_back(std::make_unique<Fiber>(this));
        fibers_[i]->block = i / THREADS, fibers_[i]->thread = i % THREADS;
    }
}
Gpu::~Gpu() = default;

void Gpu::launch(int blocks, std::function<void(int)> call) {
    call_ = std::move(call);
    grid_ = blocks, turns_ = 0, begun_ = 0;
    launched++;
    blocks_.assign(BLOCKS, {}), warps_.assign(BLOCKS, {});
    for (int i = 0; i < blocks * THREADS; i++) {
        Fiber& fiber = *fibers_[i];
        fiber.idle = false, fiber.waits = nullptr, fiber.met_block = fiber.met_warp = 0;
        const int block = fiber.block;
        fiber.task = [this, block] { call_(block); };
    }
    running_ = blocks * THREADS;
    while (running_ != 0) emulated::yield();
}

void Gpu::host(std::function<void()> program) {
    host_->task = std::move(program);
    host_->idle = false;
}

void Gpu::perform_all() {
    packets_.perform_all();
    words_.perform_all();
}

void Gpu::begin_blocks(std::mt19937& random) {
    for (int block = 0; block < grid_; block++) {
        if (block_delay == 1 || random() % block_delay == 0) begun_ |= 1u << block;
    }
}

void Gpu::go_on(std::mt19937& random) {
    if (stalled) return;
    if (running_ == 0) {
        perform_all();
        if (!host_->idle) resume(*host_);
        return;
    }
    if (stall_in != 0 && (launched > stall_in || (launched == stall_in && turns_ >= stall_after))) {
        stalled = true, stall_in = 0;
        return;
    }
    packets_.perform(random() % 64, in_order, random);
    words_.perform_one_in(word_delay, random);
    begin_blocks(random);
    blockDim = {THREADS}, gridDim = {static_cast<uint32_t>(grid_)};
    const uint64_t turns_before = turns_;
    const int fibers = grid_ * THREADS, first = static_cast<int>(random() % fibers);
    for (int i = 0; i < fibers; i++) {
        Fiber& fiber = *fibers_[(first + i) % fibers];
        const bool begun = begun_ >> fiber.block & 1;
        if (fiber.idle || !begun || (fiber.waits != nullptr && *fiber.waits == fiber.until)) continue;
        fiber.waits = nullptr;
        resume(fiber);
        turns_++;
        if (fiber.idle) running_--;
    }
    // Nobody but threads of the same block or warp ends what they wait for.
    if (turns_ == turns_before && begun_ + 1 == 1u << grid_) {
        fail("threads wait for others of their block that wait elsewhere");
    }
    if (running_ == 0) perform_all();
}
