// Random bits of a counter: Philox4x32-7, as src/quant/philox.rs has it.
#pragma once

// Keys of all rounds come from the host: as kernel parameters they are operands of the instructions that use them.
__device__ __forceinline__ uint2 product(unsigned a, unsigned b) {
    unsigned long long both;
    asm("mul.wide.u32 %0, %1, %2;\n" : "=l"(both) : "r"(a), "r"(b));
    return make_uint2(static_cast<unsigned>(both), static_cast<unsigned>(both >> 32));
}
__device__ __forceinline__ uint4 philox(uint4 c, const unsigned (&keys)[14]) {
#pragma unroll
    for (int round = 0; round < 7; round++) {
        const uint2 first = product(c.x, 0xd2511f53u), second = product(c.z, 0xcd9e8d57u);
        c = make_uint4(second.y ^ c.y ^ keys[2 * round], second.x, first.y ^ c.w ^ keys[2 * round + 1], first.x);
    }
    return c;
}
