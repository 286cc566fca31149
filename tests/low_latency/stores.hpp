// Stores that a rank has made and others do not see yet. Of two stores that nothing orders either may be seen first.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <random>
#include <vector>

#include "device.hpp"

class Stores {
  public:
    void push(void* at, const void* value, size_t bytes, int block);
    // Lets others see so many: in the order in which they were made, or in any in which those to one address keep
    // theirs.
    void perform(size_t stores, bool in_order, std::mt19937& random);
    // Lets others see each with a chance of one in so many.
    void perform_one_in(uint32_t turns, std::mt19937& random);
    // Those of a block, or to an address, or all: in the order in which they were made.
    void perform_of(int block);
    void perform_at(const void* at);
    void perform_all();
    // What a block has stored last at an address, if others do not see it yet.
    const void* find(const void* at, int block) const;

  private:
    struct Store {
        void* at;
        size_t bytes;
        int block;
        uint4 value;
    };

    template <class Which>
    void perform_if(Which&& which);

    std::vector<Store> pending_;
};
