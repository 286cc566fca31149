// Kernels of several ranks beside each other on one CPU: every thread of a grid is a fiber, one fiber runs at a time,
// and which one is drawn from a seed.
#pragma once
#include <stdint.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device.hpp"
#include "kernels.hpp"
#include "stores.hpp"

// Says what does not hold, and ends the process.
[[noreturn]] void fail(const std::string& what);

// What a barrier of fibers has counted; two of them take turns, so that nobody is overtaken.
struct Meeting {
    uint64_t values[32] = {};
    int came = 0, held = 0;
};
struct Meetings {
    Meeting of[2];
    uint32_t over = 0;  // how often all have come
};

struct Fiber;

// The GPU of a rank: one kernel at a time.
class Gpu {
  public:
    static constexpr int THREADS = 32, BLOCKS = 2;

    explicit Gpu(const std::string& library);
    ~Gpu();

    const Kernels& kernels(int block) const { return *kernels_[block]; }
    // Runs a kernel to its end, for a program of this rank: `call` is its part of each thread of a block.
    void launch(int blocks, std::function<void(int)> call);
    // Lets each fiber go on that can, unless the rank is stalled.
    void go_on(std::mt19937& random);
    // Its host's program, which is a fiber too.
    void host(std::function<void()> program);
    // Whether others see packets in the order of this rank's stores, and after how many turns a word, on average.
    bool in_order = true;
    uint32_t word_delay = 1;
    // The turns after which a block of a kernel begins, on average.
    uint32_t block_delay = 1;

    bool stalled = false;
    // Stalls when its kernel of this number has run for so many turns, or in the next; 0: does not.
    uint64_t stall_in = 0, stall_after = 0;
    uint64_t launched = 0;  // kernels

  private:
    friend int emulated::meet_block(bool);
    friend const uint64_t* emulated::meet_warp(uint64_t);
    friend void emulated::store_later(void*, uint4);
    friend void emulated::store_word_later(uint64_t*, uint64_t);
    friend uint64_t emulated::load_word(const uint64_t*);
    friend void emulated::fence();
    friend void emulated::settle(const void*);

    void perform_all();
    void begin_blocks(std::mt19937& random);

    std::vector<const Kernels*> kernels_;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::unique_ptr<Fiber> host_;
    std::function<void(int)> call_;
    std::vector<Meetings> blocks_, warps_;
    Stores packets_, words_;  // that others do not see yet
    uint32_t begun_ = 0;  // a bit for each block
    int running_ = 0;  // fibers that have not ended
    int grid_ = 0;     // blocks
    uint64_t turns_ = 0;
};

// Turns of fibers so far: the time that kernels see, in ns.
uint64_t turns();
