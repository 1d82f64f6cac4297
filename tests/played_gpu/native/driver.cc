// SPDX-License-Identifier: Apache-2.0
// The CUDA driver's own calls: devices, contexts and memory, for a program without the runtime, and
// what PyTorch asks of the driver itself. The rest of the library is stubs.
#include "device.h"
#include "memory.h"
#include "stream.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#define API __attribute__((visibility("default")))

using namespace played;

namespace {

constexpr int NOT_INITIALIZED = 3;
bool initialized = false;
// A context is its device's number, made a pointer that is not null.
thread_local std::vector<int> contexts;

void *handle_of(int device) { return (void *)(0x1000l + device); }
int device_of(void *context) { return (int)((long)context - 0x1000); }

int checked(int device) {
    if (!initialized) return NOT_INITIALIZED;
    return device < 0 || device >= (int)visible().size() ? INVALID_DEVICE : OK;
}
// The device of the current context; cudaSetDevice makes one current too.
int current(int *device) {
    if (!initialized) return NOT_INITIALIZED;
    *device = contexts.empty() ? current_device : contexts.back();
    return state(*device);
}
int synchronously(int device, int error) {
    if (error) return error;
    wait_for_all(device);
    return state(device);
}

template <class T>
int filled(void *to, T value, size_t count) {
    int device;
    if (int error = current(&device)) return error;
    current_device = device;
    put_operation(stream_of(nullptr), [=] { std::fill_n(static_cast<T *>(to), count, value); }, 0, false);
    return synchronously(device, OK);
}

}  // namespace

extern "C" {

int cudaDeviceGetAttribute(int *, int, int);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemsetAsync(void *, int, size_t, void *);

API int cuInit(unsigned) {
    initialized = true;
    return visible().empty() ? NO_DEVICE : OK;
}
API int cuDriverGetVersion(int *version) {
    *version = machine()->driver_version;
    return OK;
}
API int cuGetErrorString(int error, const char **text) {
    *text = text_of(error).text;
    return OK;
}
API int cuGetErrorName(int error, const char **name) {
    *name = text_of(error).driver_name;
    return OK;
}

API int cuDeviceGetCount(int *count) {
    *count = (int)visible().size();
    return initialized ? OK : NOT_INITIALIZED;
}
API int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return checked(ordinal);
}
API int cuDeviceGetName(char *name, int length, int device) {
    if (int error = checked(device)) return error;
    snprintf(name, (size_t)length, "%s", described(device).name.c_str());
    return OK;
}
API int cuDeviceGetUuid(char *bytes, int device) {
    if (int error = checked(device)) return error;
    uuid_bytes(device, bytes);
    return OK;
}
API int cuDeviceGetUuid_v2(char *bytes, int device) { return cuDeviceGetUuid(bytes, device); }
API int cuDeviceGetPCIBusId(char *text, int length, int device) {
    if (int error = checked(device)) return error;
    snprintf(text, (size_t)length, "%s", described(device).pci_address.c_str());
    return OK;
}
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (int error = checked(device)) return error;
    return cudaDeviceGetAttribute(value, attribute, device);
}
API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (int error = checked(device)) return error;
    *bytes = described(device).memory_bytes;
    return OK;
}
API int cuDeviceComputeCapability(int *major, int *minor, int device) {
    if (int error = checked(device)) return error;
    *major = described(device).major;
    *minor = described(device).minor;
    return OK;
}
API int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return checked(device);
}

API int cuCtxCreate_v2(void **context, unsigned, int device) {
    if (int error = checked(device)) return error;
    if (int error = state(device)) return error;
    contexts.push_back(device);
    current_device = device;
    *context = handle_of(device);
    return OK;
}
API int cuCtxCreate_v4(void **context, void *, unsigned flags, int device) { return cuCtxCreate_v2(context, flags, device); }
API int cuCtxDestroy_v2(void *context) {
    if (!contexts.empty() && contexts.back() == device_of(context)) contexts.pop_back();
    return OK;
}
API int cuCtxGetCurrent(void **context) {
    *context = handle_of(contexts.empty() ? current_device : contexts.back());
    return initialized ? OK : NOT_INITIALIZED;
}
API int cuCtxSetCurrent(void *context) {
    if (!initialized) return NOT_INITIALIZED;
    contexts.clear();
    if (context) contexts.push_back(current_device = device_of(context));
    return OK;
}
API int cuCtxPushCurrent_v2(void *context) {
    contexts.push_back(current_device = device_of(context));
    return OK;
}
API int cuCtxPopCurrent_v2(void **context) {
    if (contexts.empty()) return INVALID_CONTEXT;
    if (context) *context = handle_of(contexts.back());
    contexts.pop_back();
    if (!contexts.empty()) current_device = contexts.back();
    return OK;
}
API int cuCtxGetDevice(int *device) { return current(device); }
API int cuCtxSynchronize() {
    int device;
    if (int error = current(&device)) return error;
    return synchronously(device, OK);
}
API int cuCtxEnablePeerAccess(void *peer, unsigned) {
    int device;
    if (int error = current(&device)) return error;
    for (int each : {device, device_of(peer)})
        if (auto refused = fault_of(each, "peer_error")) return (int)refused->value;
    return OK;
}
API int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (int error = checked(device)) return error;
    *context = handle_of(device);
    return state(device);
}
API int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = !is_lost(device);
    return OK;
}

API int cuMemAlloc_v2(void **pointer, size_t size) {
    int device;
    if (int error = current(&device)) return error;
    return size ? allocate(pointer, size, device, Kind::DEVICE) : (int)INVALID_VALUE;
}
API int cuMemFree_v2(void *pointer) {
    int device;
    if (int error = current(&device)) return error;
    wait_for_all(device);
    return release(pointer);
}
API int cuMemAllocHost_v2(void **pointer, size_t size) {
    int device;
    if (int error = current(&device)) return error;
    return allocate(pointer, size, device, Kind::HOST);
}
API int cuMemHostAlloc(void **pointer, size_t size, unsigned) { return cuMemAllocHost_v2(pointer, size); }
API int cuMemFreeHost(void *pointer) { return release(pointer); }
API int cuMemGetInfo_v2(size_t *free, size_t *total) {
    int device;
    if (int error = current(&device)) return error;
    memory_info(device, free, total);
    return OK;
}
API int cuMemGetAddressRange_v2(void **begin, size_t *size, void *pointer) {
    const Block block = block_of(pointer);
    if (begin) *begin = block.begin;
    if (size) *size = block.size;
    return block.kind == Kind::NONE ? INVALID_VALUE : OK;
}

// Memory of any device or of the host, to any: the context's default stream does it.
static int copied(void *to, const void *from, size_t size, void *stream, bool wait) {
    int device;
    if (int error = current(&device)) return error;
    current_device = device;
    const int error = cudaMemcpyAsync(to, from, size, 4, stream);
    return wait ? synchronously(device, error) : error;
}
API int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { return copied(to, from, size, nullptr, true); }
API int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { return copied(to, from, size, nullptr, true); }
API int cuMemcpyDtoD_v2(void *to, const void *from, size_t size) { return copied(to, from, size, nullptr, true); }
API int cuMemcpy(void *to, const void *from, size_t size) { return copied(to, from, size, nullptr, true); }
API int cuMemcpyPeer(void *to, void *, const void *from, void *, size_t size) { return copied(to, from, size, nullptr, true); }
API int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t size, void *s) { return copied(to, from, size, s, false); }
API int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t size, void *s) { return copied(to, from, size, s, false); }
API int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, void *s) { return copied(to, from, size, s, false); }
API int cuMemcpyPeerAsync(void *to, void *, const void *from, void *, size_t size, void *s) {
    return copied(to, from, size, s, false);
}

API int cuMemsetD8_v2(void *to, unsigned char value, size_t count) { return filled(to, value, count); }
API int cuMemsetD16_v2(void *to, unsigned short value, size_t count) { return filled(to, value, count); }
API int cuMemsetD32_v2(void *to, unsigned value, size_t count) { return filled(to, value, count); }
API int cuMemsetD8Async(void *to, unsigned char value, size_t count, void *stream) { return cudaMemsetAsync(to, value, count, stream); }

API int cuStreamCreate(void **stream, unsigned) {
    int device;
    if (int error = current(&device)) return error;
    *stream = new_stream(device, 0);
    return OK;
}
API int cuStreamDestroy_v2(void *stream) {
    destroy(static_cast<Stream *>(stream));
    return OK;
}
API int cuStreamSynchronize(void *stream) {
    stream_of(stream)->wait();
    return state(stream_of(stream)->device);
}
API int cuEventCreate(void **event, unsigned) {
    *event = new Event;
    return OK;
}
API int cuEventDestroy_v2(void *event) {
    delete static_cast<Event *>(event);
    return OK;
}
API int cuEventRecord(void *event, void *stream) { return static_cast<Event *>(event)->record(stream_of(stream)); }
API int cuEventQuery(void *event) { return static_cast<Event *>(event)->query(); }
API int cuEventSynchronize(void *event) { return static_cast<Event *>(event)->wait(); }
API int cuEventElapsedTime(float *ms, void *begin, void *end) {
    return Event::elapsed_ms(*static_cast<Event *>(begin), *static_cast<Event *>(end), ms);
}
}
