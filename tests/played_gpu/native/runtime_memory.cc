// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime: memory, and copies between memories.
#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <memory>

using namespace played;

namespace {

enum CopyKind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };
constexpr size_t TIMED_BYTES = 1 << 20;  // copies below this take as long as they take, and are right

// From one block to another by a device: within it, between it and its host, or between two devices.
struct Way {
    Block to, from;
    int device;

    bool has_two_devices() const {
        return to.kind == Kind::DEVICE && from.kind == Kind::DEVICE && to.device != from.device;
    }
    double seconds(size_t size) const {
        if (size < TIMED_BYTES) return 0;
        const double bytes = (double)size;
        if (has_two_devices()) return std::max(link_seconds(to.device, bytes), link_seconds(from.device, bytes));
        const bool within = to.kind == Kind::DEVICE && from.kind == Kind::DEVICE;
        return within ? copy_seconds(device, 2 * bytes) : host_copy_seconds(device, bytes);  // read and written
    }
    bool is_wrong(size_t size) const {
        if (size < TIMED_BYTES) return false;
        return is_memory_wrong(device) || (has_two_devices() && is_message_wrong(to.device));
    }
};

void copy(void *to, const void *from, size_t size, const Way &way) {
    memmove(to, from, size);
    // On its way back data changes elsewhere: in the same place the second change would undo the first.
    if (way.is_wrong(size)) ((char *)to)[way.to.kind == Kind::DEVICE ? size / 2 : size / 3] ^= 4;
}

struct PointerAttributes {
    int kind, device;
    void *on_device, *on_host;
#if CUDA_MAJOR >= 13
    long reserved[8];
#endif
};
static_assert(sizeof(PointerAttributes) == (CUDA_MAJOR >= 13 ? 88 : 24));

}  // namespace

extern "C" {

API int cudaMalloc(void **pointer, size_t size) { return fail(allocate(pointer, size, current_device, Kind::DEVICE)); }
API int cudaMallocAsync(void **pointer, size_t size, void *) { return cudaMalloc(pointer, size); }
API int cudaHostAlloc(void **pointer, size_t size, unsigned) {
    return fail(allocate(pointer, size, current_device, Kind::HOST));
}
API int cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
API int cudaFree(void *pointer) {
    if (int error = state(current_device)) return fail(error);
    if (pointer) wait_for_all(current_device);
    return fail(release(pointer));
}
API int cudaFreeAsync(void *pointer, void *stream) {
    stream_of(stream)->put([=] { release(pointer); }, false);
    return OK;
}
API int cudaFreeHost(void *pointer) { return fail(release(pointer)); }
API int cudaHostRegister(void *, size_t, unsigned) { return OK; }
API int cudaHostUnregister(void *) { return OK; }
API int cudaHostGetDevicePointer(void **on_device, void *on_host, unsigned) {
    *on_device = on_host;
    return OK;
}
API int cudaMemGetInfo(size_t *free, size_t *total) {
    if (int error = state(current_device)) return fail(error);
    memory_info(current_device, free, total);
    return OK;
}
API int cudaPointerGetAttributes(PointerAttributes *attributes, const void *pointer) {
    const Block block = block_of(pointer);
    *attributes = {};
    attributes->kind = (int)block.kind;
    attributes->device = block.device;
    if (block.kind != Kind::NONE) attributes->on_device = (void *)pointer;
    if (block.kind != Kind::DEVICE) attributes->on_host = (void *)pointer;
    return OK;
}

// From ordinary memory of the host the call returns once the data has been taken from there.
API int cudaMemcpyAsync(void *to, const void *from, size_t size, int, void *handle) {
    Stream *stream = stream_of(handle);
    if (int error = state(stream->device)) return fail(error);
    const Way way{block_of(to), block_of(from), stream->device};
    const double modelled_s = way.seconds(size);
    if (way.from.kind == Kind::NONE && (!stream->is_idle() || is_slowed(stream->device) || modelled_s > 0)) {
        auto taken = std::make_shared<std::string>((const char *)from, size);
        put_operation(stream, [=] { copy(to, taken->data(), size, way); }, modelled_s, true);
    } else {
        put_operation(stream, [=] { copy(to, from, size, way); }, modelled_s, false);
    }
    return OK;
}
API int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    if (int error = cudaMemcpyAsync(to, from, size, kind, nullptr)) return error;
    stream_of(nullptr)->wait();
    return fail(state(current_device));
}
API int cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, void *stream) {
    return cudaMemcpyAsync(to, from, size, DEVICE_TO_DEVICE, stream);
}
API int cudaMemcpyPeer(void *to, int, const void *from, int, size_t size) {
    return cudaMemcpy(to, from, size, DEVICE_TO_DEVICE);
}
API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int,
                          void *stream) {
    put_operation(stream_of(stream), [=] {
        for (size_t row = 0; row < height; row++)
            memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    }, 0, false);
    return fail(state(current_device));
}
API int cudaMemsetAsync(void *to, int value, size_t size, void *handle) {
    Stream *stream = stream_of(handle);
    if (int error = state(stream->device)) return fail(error);
    const double modelled_s = size < TIMED_BYTES ? 0 : copy_seconds(stream->device, (double)size);
    put_operation(stream, [=] { memset(to, value, size); }, modelled_s, false);
    return OK;
}
API int cudaMemset(void *to, int value, size_t size) {
    if (int error = cudaMemsetAsync(to, value, size, nullptr)) return error;
    stream_of(nullptr)->wait();
    return fail(state(current_device));
}
API int cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, int) { return OK; }
API int cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = (void *)symbol;
    return OK;
}

// Pools of stream-ordered memory: enough that torch finds none in use.
API int cudaDeviceGetDefaultMemPool(void **pool, int) {
    static int only;
    *pool = &only;
    return OK;
}
API int cudaMemPoolGetAttribute(void *, int, void *value) {
    memset(value, 0, 8);
    return OK;
}
API int cudaMemPoolSetAttribute(void *, int, void *) { return OK; }
API int cudaMemPoolSetAccess(void *, const void *, size_t) { return OK; }
API int cudaMemPoolTrimTo(void *, size_t) { return OK; }
}
