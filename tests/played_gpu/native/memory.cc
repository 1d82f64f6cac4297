// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include "device.h"
#include "usage.h"

#include <map>
#include <mutex>
#include <sys/mman.h>

namespace played {
namespace {

std::mutex &mutex = *new std::mutex;
auto &blocks = *new std::map<char *, Block>;

size_t pages(size_t size) { return (size + 4095) & ~size_t{4095}; }

size_t used(int device) {
    auto held = fault_of(device, "memory_used");
    return usage(on_node(device)).allocated_bytes + allocated_by_others(on_node(device)) +
           (held ? (size_t)held->value : 0);
}

}  // namespace

int allocate(void **pointer, size_t size, int device, Kind kind) {
    *pointer = nullptr;
    if (!size) return OK;
    if (int error = state(device)) return error;
    std::lock_guard<std::mutex> lock(mutex);
    if (kind == Kind::DEVICE && used(device) + size > described(device).memory_bytes) return OUT_OF_MEMORY;
    void *memory = mmap(nullptr, pages(size), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    blocks[(char *)memory] = {size, device, kind, memory};
    if (kind == Kind::DEVICE) usage(on_node(device)).allocated_bytes += size;
    *pointer = memory;
    return OK;
}

int release(void *pointer) {
    if (!pointer) return OK;
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find((char *)pointer);
    if (found == blocks.end()) return INVALID_VALUE;
    const Block block = found->second;
    if (block.kind == Kind::DEVICE) usage(on_node(block.device)).allocated_bytes -= block.size;
    munmap(pointer, pages(block.size));
    blocks.erase(found);
    return OK;
}

Block block_of(const void *pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound((char *)pointer);
    if (after == blocks.begin()) return {0, -1, Kind::NONE, nullptr};
    auto [begin, block] = *--after;
    if ((char *)pointer >= begin + block.size) return {0, -1, Kind::NONE, nullptr};
    return block;
}

void memory_info(int device, size_t *free, size_t *total) {
    std::lock_guard<std::mutex> lock(mutex);
    const size_t all = described(device).memory_bytes, taken = used(device);
    if (total) *total = all;
    if (free) *free = taken < all ? all - taken : 0;
}

}  // namespace played
