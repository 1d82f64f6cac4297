// SPDX-License-Identifier: Apache-2.0
// Memory of devices, and page-locked memory of the host: both are memory of this process.
#pragma once
#include <cstddef>

namespace played {

enum class Kind { NONE = 0, HOST = 1, DEVICE = 2 };  // as cudaMemoryType numbers them
struct Block {
    size_t size;
    int device;
    Kind kind;
    void *begin;
};

int allocate(void **pointer, size_t size, int device, Kind kind);
int release(void *pointer);
Block block_of(const void *pointer);  // kind NONE: not allocated here

// As the device would say it: other processes and the fault memory_used count.
void memory_info(int device, size_t *free, size_t *total);

}  // namespace played
