// The kernels that a library has.
#pragma once
#include "device.hpp"
#include "common/params.h"

struct Kernels {
    void (*exchange)(LowLatencyExchangeParams);
    void (*dispatch)(LowLatencyDispatchParams);
    void (*combine)(LowLatencyCombineParams);
};
