// SPDX-License-Identifier: Apache-2.0
// What one process does on one device, for the other processes of the node and for NVML: a mapped
// file /dev/shm/played-gpu-UUID-PID that is there from opening the device until the process ends, and
// locked for as long. Behind the numbers it names the file that describes the device. That of a
// process that was killed is removed by the next one that opens a device, whichever that is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace played {

struct Usage {
    uint64_t allocated_bytes;
    uint64_t busy_until_ns;  // of CLOCK_MONOTONIC
    uint64_t worked_ns;
    uint64_t is_throttled;
    uint64_t has_fallen;  // off the bus; holds for the device for as long as that is described
    uint64_t spins_until_ns;  // in a kernel that only waits, as NCCL's for its peers
};

// This process's own; made by the first call.
Usage &usage(int device);

// Of all other processes that are alive: the sum of their memory.
size_t allocated_by_others(int device);

// Whether another process, alive or not, has seen the device fall off the bus.
bool has_fallen_before(int device);

// Remove what dead processes have left. What says that this device fell stays if `keep_fallen`, and
// what says so of another one for as long as a file describes that.
void remove_leftovers(int device, bool keep_fallen);

}  // namespace played
