// A step of AdamW: the gradients' norm, the numbers of the step, and the step. Limited by bytes, but for the numbers.
//
//   square_leaves_*   gradients [rows, width] -> f64 sums of squares of leaves, by tasks of up to four; a warp a task
//   square_nodes      those -> f64 sums of larger nodes; a block a node
//   norm_sums         all ranks' nodes -> f64 a weight; a block a weight
//   step_control      those -> norm, clipping, the loss's factor, bias corrections: f64 [groups, 9]; one block
//   adamw             gradients, main weights f32 [n], moments [n] -> the latter two and the rounded parameters [n]; a
//                     block ADAMW_SPAN elements of one parameter
//   convert_type      any floating type to f32, f16 or bf16; a thread an element
//
// The order of sums is stated in src/kernels/optimizer.rs. Every product and sum of a step is rounded by itself, as on
// the CPU: no multiply-add is fused but where the product is exact (squares in f64).
//
// Notes: kernels/notes/adamw.md.
#include "common/common.cuh"
#include "common/philox.cuh"

// Four elements at once.
struct Four {
    float v[4];
};
__device__ __forceinline__ Four load_four(const float* at) {
    const float4 f = *reinterpret_cast<const float4*>(at);
    return {{f.x, f.y, f.z, f.w}};
}
template <class T>
__device__ __forceinline__ Four load_four(const T* at) {
    const uint2 word = *reinterpret_cast<const uint2*>(at);
    T v[4];
    memcpy(v, &word, sizeof v);
    return {{to_float(v[0]), to_float(v[1]), to_float(v[2]), to_float(v[3])}};
}
// By the intrinsic: an assignment is taken apart into stores of elements.
__device__ __forceinline__ void store_four(float* at, const Four& f) {
    __stwb(reinterpret_cast<float4*>(at), make_float4(f.v[0], f.v[1], f.v[2], f.v[3]));
}
template <class T>
__device__ __forceinline__ void store_four(T* at, const Four& f) {
    const T v[4] = {from_float<T>(f.v[0]), from_float<T>(f.v[1]), from_float<T>(f.v[2]), from_float<T>(f.v[3])};
    uint2 word;
    memcpy(&word, v, sizeof word);
    __stwb(reinterpret_cast<uint2*>(at), word);
}

// The job that a block or a task is of.
template <class J, class F>
__device__ __forceinline__ int find_job(const J* jobs, int64_t count, F&& first, int64_t at) {
    int job = 0;
    while (job + 1 < count && first(jobs[job + 1]) <= at) job++;
    return job;
}

// ------------------------------------------------------------------------------------------------------------- norm

// A leaf's sum, on every lane. Lane l has partial sums 4l .. 4l + 3; all words of a leaf's quarter are under way before
// the first is added.
template <class T>
__device__ double leaf_sum(const T* values, int count, bool wide) {
    constexpr int ROUNDS = 8;
    const int lane = threadIdx.x % 32;
    double sums[4] = {};
    int at = 4 * lane;
    const int step = static_cast<int>(NORM_LEAF_SUMS);
    if (wide) {
        for (; at + (ROUNDS - 1) * step < count; at += ROUNDS * step) {
            Four words[ROUNDS];
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) words[r] = load_four(values + at + r * step);
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const double x = words[r].v[i];
                    sums[i] = fma(x, x, sums[i]);
                }
            }
        }
    }
    for (; at < count; at += step) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (at + i >= count) break;
            const double x = to_float(values[at + i]);
            sums[i] = fma(x, x, sums[i]);
        }
    }
    return warp_sum(__dadd_rn(__dadd_rn(sums[0], sums[1]), __dadd_rn(sums[2], sums[3])));
}

template <class T>
__device__ __forceinline__ double leaf_of(const SquareJob& job, int64_t leaf) {
    if (leaf >= job.leaves) return 0.0;
    const int64_t row = leaf / job.row_leaves, start = leaf % job.row_leaves * NORM_LEAF;
    const int64_t rest = job.width - start;
    const T* values = static_cast<const T*>(job.gradient) + row * job.width + start;
    return leaf_sum(values, static_cast<int>(rest < NORM_LEAF ? rest : NORM_LEAF), job.wide != 0);
}

template <class T>
__device__ __forceinline__ void square_task(const SquareJob& job, int64_t task) {
    const int64_t first = task << job.height;
    double sum = leaf_of<T>(job, first);
    if (job.height > 0) sum = __dadd_rn(sum, leaf_of<T>(job, first + 1));
    if (job.height > 1) {
        const double left = leaf_of<T>(job, first + 2), right = leaf_of<T>(job, first + 3);
        sum = __dadd_rn(sum, __dadd_rn(left, right));
    }
    if (threadIdx.x % 32 == 0) job.out[task] = sum;
}

extern "C" __global__ void square_leaves(const __grid_constant__ SquareJobs p) {
    const int64_t task = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= p.tasks) return;
    const SquareJob& job = p.jobs[find_job(p.jobs, p.count, [](const SquareJob& j) { return j.first_task; }, task)];
    const int64_t own = task - job.first_task;
    if (job.type == TYPE_F32) square_task<float>(job, own);
    else if (job.type == TYPE_F16) square_task<f16>(job, own);
    else square_task<bf16>(job, own);
}

// A tree over `count` numbers and zeros behind them, `size` in all, a power of two; by a whole block, whose first
// thread has the sum.
constexpr int TREE_THREADS = ADAMW_THREADS;
template <class F>
__device__ double tree_sum(int64_t count, int64_t size, F&& value) {
    __shared__ double sums[TREE_THREADS];
    const int64_t each = size > TREE_THREADS ? size / TREE_THREADS : 1;
    const int64_t first = threadIdx.x * each;
    double waiting[48], sum = 0.0;
    if (first < count) {
        for (int64_t i = 0; i < each; i++) {
            sum = first + i < count ? value(first + i) : 0.0;
            int level = 0;
            for (; i >> level & 1; level++) sum = __dadd_rn(waiting[level], sum);
            waiting[level] = sum;
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 1; step < TREE_THREADS; step *= 2) {
        if (threadIdx.x % (2 * step) == 0) sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[threadIdx.x + step]);
        __syncthreads();
    }
    return sums[0];
}

__device__ __forceinline__ int64_t power_from(int64_t count) {
    return count <= 1 ? 1 : int64_t{1} << (64 - __clzll(count - 1));
}

extern "C" __global__ void square_nodes(const __grid_constant__ TreeJobs p) {
    const TreeJob& job = p.jobs[find_job(p.jobs, p.count, [](const TreeJob& j) { return j.first_node; }, blockIdx.x)];
    const int64_t node = blockIdx.x - job.first_node, first = node << job.height;
    const int64_t rest = job.count - first, most = int64_t{1} << job.height;
    const int64_t size = rest < most ? power_from(rest) : most;
    const double sum = tree_sum(rest < size ? rest : size, size, [&](int64_t i) { return job.values[first + i]; });
    if (threadIdx.x == 0) job.out[node] = sum;
}

extern "C" __global__ void norm_sums(const __grid_constant__ NormSumsParams p) {
    const int64_t first = p.starts[blockIdx.x], count = p.starts[blockIdx.x + 1] - first;
    const double sum = tree_sum(count, power_from(count), [&](int64_t i) {
        const int64_t node = p.order[first + i];
        // A number that the host has not made so: the step is skipped.
        return node >= 0 && node < p.node_count ? p.nodes[node] : __longlong_as_double(0x7ff8000000000000ll);
    });
    if (threadIdx.x == 0) p.sums[blockIdx.x] = sum;
}

// ------------------------------------------------------------------------------------------------- numbers of a step

extern "C" __global__ void step_control(const __grid_constant__ StepControlParams p) {
    __shared__ double sums[TREE_THREADS];
    double total = 0.0;
    for (int64_t at = 0; p.sums && at < p.weights; at += TREE_THREADS) {
        if (at + threadIdx.x < p.weights) sums[threadIdx.x] = p.sums[at + threadIdx.x];
        __syncthreads();
        const int64_t rest = p.weights - at;
        if (threadIdx.x == 0) {
            for (int i = 0; i < (rest < TREE_THREADS ? rest : TREE_THREADS); i++) total = __dadd_rn(total, sums[i]);
        }
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    double* state = p.state;
    const double inverse = __ddiv_rn(1.0, state[STATE_SCALE]);
    double factor = inverse;
    bool skip = false;
    if (p.sums) {
        const double norm = __dmul_rn(__dsqrt_rn(total), inverse);
        state[STATE_NORM] = norm;
        skip = !isfinite(norm);
        if (norm > p.max_norm) factor = __dmul_rn(inverse, __ddiv_rn(p.max_norm, norm));
    }
    if (p.scaled && skip) {
        state[STATE_SCALE] = fmax(__dmul_rn(state[STATE_SCALE], p.backoff), p.min);
        state[STATE_GOOD] = 0.0;
    } else if (p.scaled) {
        double good = __dadd_rn(state[STATE_GOOD], 1.0);
        if (good >= p.interval) {
            state[STATE_SCALE] = fmin(__dmul_rn(state[STATE_SCALE], p.growth), p.max);
            good = 0.0;
        }
        state[STATE_GOOD] = good;
    }
    state[STATE_FACTOR] = factor;
    state[STATE_SKIP] = skip ? 1.0 : 0.0;
    state[skip ? STATE_SKIPPED : STATE_STEP] = __dadd_rn(state[skip ? STATE_SKIPPED : STATE_STEP], 1.0);
    for (int64_t g = 0; g < p.groups; g++) {
        const double* settings = p.settings + g * GROUP_SETTINGS;
        double* powers = state + STATE_NUMBERS + g * GROUP_STATE;
        double* to = p.coefficients + g * COEFFICIENTS;
        const double rate = settings[0], beta1 = settings[1], beta2 = settings[2];
        if (!skip) {
            powers[0] = __dmul_rn(powers[0], beta1);
            powers[1] = __dmul_rn(powers[1], beta2);
        }
        to[COEFFICIENT_SKIP] = skip ? 1.0 : 0.0;
        to[COEFFICIENT_FACTOR] = factor;
        to[COEFFICIENT_FIRST] = __dsub_rn(1.0, beta1);
        to[COEFFICIENT_SECOND] = __dsub_rn(1.0, beta2);
        to[COEFFICIENT_RATE] = __ddiv_rn(rate, __dsub_rn(1.0, powers[0]));
        to[COEFFICIENT_ROOT] = __ddiv_rn(1.0, __dsqrt_rn(__dsub_rn(1.0, powers[1])));
        to[COEFFICIENT_EPSILON] = settings[3];
        to[COEFFICIENT_DECAY] = __dmul_rn(rate, settings[4]);
        to[COEFFICIENT_STEP] = state[STATE_STEP];
    }
}

// -------------------------------------------------------------------------------------------------------------- step

struct Numbers {
    float factor, first, second, rate, root, epsilon, decay;
    unsigned step;

    __device__ __forceinline__ explicit Numbers(const double* row) {
        factor = static_cast<float>(row[COEFFICIENT_FACTOR]);
        first = static_cast<float>(row[COEFFICIENT_FIRST]);
        second = static_cast<float>(row[COEFFICIENT_SECOND]);
        rate = static_cast<float>(row[COEFFICIENT_RATE]);
        root = static_cast<float>(row[COEFFICIENT_ROOT]);
        epsilon = static_cast<float>(row[COEFFICIENT_EPSILON]);
        decay = static_cast<float>(row[COEFFICIENT_DECAY]);
        step = static_cast<unsigned>(static_cast<unsigned long long>(row[COEFFICIENT_STEP]));
    }

    __device__ __forceinline__ void element(float g, float& m, float& v, float& w) const {
        g = __fmul_rn(g, factor);
        m = __fadd_rn(m, __fmul_rn(first, __fsub_rn(g, m)));
        v = __fadd_rn(v, __fmul_rn(second, __fsub_rn(__fmul_rn(g, g), v)));
        const float root_of_v = __fadd_rn(__fmul_rn(__fsqrt_rn(v), root), epsilon);
        w = __fsub_rn(w, __fadd_rn(__fmul_rn(decay, w), __fmul_rn(rate, __fdiv_rn(m, root_of_v))));
    }
};

// A number as bf16 holds it, rounded up where `bits` (16 of them) carry over.
__device__ __forceinline__ float stochastic(float value, unsigned bits) {
    const unsigned word = __float_as_uint(value);
    if ((word & 0x7f800000u) == 0x7f800000u) return value;
    return __uint_as_float((word + bits) & 0xffff0000u);
}

__device__ __forceinline__ uint4 random_words(const AdamWJobs& p, const AdamWJob& job, unsigned step, int64_t element) {
    const unsigned long long block = static_cast<unsigned long long>(element) / 4;
    const uint4 counter = make_uint4(static_cast<unsigned>(block), static_cast<unsigned>(block >> 32),
                                     static_cast<unsigned>(job.number), step);
    return philox(counter, p.keys);
}
__device__ __forceinline__ unsigned word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

constexpr int64_t TYPE_MASK = 3, ROUNDED_SHIFT = 2, HALF_MOMENTS = 16, FOUR_AT_ONCE = 32;

// One element, at any address.
__device__ void single(const AdamWJobs& p, const AdamWJob& job, const Numbers& numbers, int64_t i) {
    const bool half_moments = job.types & HALF_MOMENTS;
    const int64_t moments = half_moments ? TYPE_BF16 : TYPE_F32;
    float m = load_any(job.first, moments, i), v = load_any(job.second, moments, i), w = job.main[i];
    numbers.element(load_any(job.gradient, job.types & TYPE_MASK, i), m, v, w);
    if (half_moments) {
        const int64_t element = job.element + i;
        const unsigned bits = word_of(random_words(p, job, numbers.step, element), static_cast<int>(element & 3));
        m = stochastic(m, bits >> 16), v = stochastic(v, bits & 0xffffu);
    }
    job.main[i] = w;
    store_any(job.first, moments, i, m);
    store_any(job.second, moments, i, v);
    if (job.rounded) store_any(job.rounded, job.types >> ROUNDED_SHIFT & TYPE_MASK, i, w);
}

// Two words of four elements a thread and turn, all read before the first is computed with.
template <class G, class M>
__device__ void by_four(const AdamWJobs& p, const AdamWJob& job, const Numbers& numbers, int64_t at, int64_t end) {
    constexpr int WORDS = 2;
    const int64_t next = static_cast<int64_t>(blockDim.x) * 4;
    const G* gradient = static_cast<const G*>(job.gradient);
    M* first = static_cast<M*>(job.first);
    M* second = static_cast<M*>(job.second);
    for (int64_t i = at + threadIdx.x * 4; i < end; i += WORDS * next) {
        Four g[WORDS], m[WORDS], v[WORDS], w[WORDS];
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const int64_t place = i + k * next;
            if (place >= end) break;
            g[k] = load_four(gradient + place);
            m[k] = load_four(first + place);
            v[k] = load_four(second + place);
            w[k] = load_four(job.main + place);
        }
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const int64_t place = i + k * next;
            if (place >= end) break;
#pragma unroll
            for (int e = 0; e < 4; e++) numbers.element(g[k].v[e], m[k].v[e], v[k].v[e], w[k].v[e]);
            if (sizeof(M) == 2) {
                const uint4 words = random_words(p, job, numbers.step, job.element + place);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    m[k].v[e] = stochastic(m[k].v[e], word_of(words, e) >> 16);
                    v[k].v[e] = stochastic(v[k].v[e], word_of(words, e) & 0xffffu);
                }
            }
            store_four(job.main + place, w[k]);
            store_four(first + place, m[k]);
            store_four(second + place, v[k]);
            if (!job.rounded) continue;
            if ((job.types >> ROUNDED_SHIFT & TYPE_MASK) == TYPE_F16) store_four(static_cast<f16*>(job.rounded) + place, w[k]);
            else store_four(static_cast<bf16*>(job.rounded) + place, w[k]);
        }
    }
}

template <class M>
__device__ __forceinline__ void by_gradient(const AdamWJobs& p, const AdamWJob& job, const Numbers& numbers, int64_t at, int64_t end) {
    const int64_t type = job.types & TYPE_MASK;
    if (type == TYPE_F32) by_four<float, M>(p, job, numbers, at, end);
    else if (type == TYPE_F16) by_four<f16, M>(p, job, numbers, at, end);
    else by_four<bf16, M>(p, job, numbers, at, end);
}

extern "C" __global__ void __launch_bounds__(ADAMW_THREADS) adamw(const __grid_constant__ AdamWJobs p) {
    if (p.coefficients[COEFFICIENT_SKIP] != 0.0) return;
    const AdamWJob& job = p.jobs[find_job(p.jobs, p.count, [](const AdamWJob& j) { return j.first_block; }, blockIdx.x)];
    const Numbers numbers(p.coefficients);
    const int64_t at = (blockIdx.x - job.first_block) * ADAMW_SPAN;
    const int64_t end = job.count < at + ADAMW_SPAN ? job.count : at + ADAMW_SPAN;
    int64_t rest = at;
    if (job.types & FOUR_AT_ONCE) {
        rest = end - (end - at) % 4;
        if (job.types & HALF_MOMENTS) by_gradient<bf16>(p, job, numbers, at, rest);
        else by_gradient<float>(p, job, numbers, at, rest);
    }
    for (int64_t i = rest + threadIdx.x; i < end; i += blockDim.x) single(p, job, numbers, i);
}

extern "C" __global__ void convert_type(const __grid_constant__ ConvertTypeParams p) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += step) {
        const float value = p.from_type < 0 ? static_cast<float>(static_cast<const double*>(p.from)[i]) : load_any(p.from, p.from_type, i);
        store_any(p.to, p.to_type, i, value);
    }
}
