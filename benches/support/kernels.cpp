// Records kernels, copies and fills of a program on its GPUs, with their times: loaded into it by the driver, asked of
// CUPTI.
//   g++ -O2 -shared -fPIC kernels.cpp -I$CUDA_HOME/include -o kernels.so -lcupti     (CUPTI is part of CUDA's toolkit)
//   CUDA_INJECTION64_PATH=$PWD/kernels.so KERNELS=out.tsv PROGRAM …
// out.tsv: GPU, start and end in nanoseconds, stream, blocks (of a kernel) or bytes (of a copy or fill), and what it
// was; in no order. Replays of graphs have their kernels in it. kernels.py sums it.
#include <cupti.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace {
std::mutex lock;
FILE* out;

template <class Record>
void line(const Record* r, unsigned long long size, const char* what) {
    const unsigned long long start = r->start, end = r->end;
    fprintf(out, "%u\t%llu\t%llu\t%u\t%llu\t%s\n", unsigned(r->deviceId), start, end, unsigned(r->streamId), size, what);
}

void CUPTIAPI requested(uint8_t** buffer, size_t* size, size_t* most) {
    *size = 4u << 20;
    *most = 0;
    *buffer = static_cast<uint8_t*>(aligned_alloc(8, *size));
}

void CUPTIAPI completed(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
    std::lock_guard<std::mutex> guard(lock);
    for (CUpti_Activity* record = nullptr; cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS;) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            auto* kernel = reinterpret_cast<CUpti_ActivityKernel10*>(record);
            const unsigned long long blocks = 1ull * kernel->gridX * kernel->gridY * kernel->gridZ;
            line(kernel, blocks, kernel->name ? kernel->name : "?");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            auto* copy = reinterpret_cast<CUpti_ActivityMemcpy6*>(record);
            line(copy, copy->bytes, copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOD ? "copy" : "copy, host");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
            auto* copy = reinterpret_cast<CUpti_ActivityMemcpyPtoP4*>(record);
            line(copy, copy->bytes, "copy, peer");
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            auto* fill = reinterpret_cast<CUpti_ActivityMemset4*>(record);
            line(fill, fill->bytes, "fill");
        }
    }
    free(buffer);
}

void finish() {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    std::lock_guard<std::mutex> guard(lock);
    fflush(out);
}
}  // namespace

extern "C" int InitializeInjection() {
    const char* path = getenv("KERNELS");
    out = path ? fopen(path, "w") : stderr;
    if (!out) return 0;
    cuptiActivityRegisterCallbacks(requested, completed);
    for (auto kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMCPY2,
                      CUPTI_ACTIVITY_KIND_MEMSET})
        cuptiActivityEnable(kind);
    atexit(finish);
    return 1;
}
