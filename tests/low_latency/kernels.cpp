// The kernels of low latency over NVLink as C++, with device.hpp in the place of CUDA.
#include "sm90_nvlink_low_latency.cu"
#include "sm90_nvlink_low_latency_exchange.cu"

#include "kernels.hpp"

extern "C" __attribute__((visibility("default"))) const Kernels kernels;
extern "C" const Kernels kernels{sm90_nvlink_low_latency_exchange, sm90_nvlink_low_latency_dispatch, sm90_nvlink_low_latency_combine_f32};
