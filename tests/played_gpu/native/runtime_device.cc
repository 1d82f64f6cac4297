// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime: which devices there are, and what they are.
#include "runtime.h"

#include <cctype>
#include <cstdio>
#include <cstring>
#include <strings.h>

using namespace played;

namespace {

thread_local int last_error = OK;

// Fields that torch or a probe reads are named; the others keep the places of CUDA's structure.
struct DeviceProp {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t total_memory, shared_per_block;
    int registers_per_block, warp_size;
    size_t pitch;
    int threads_per_block, threads_dim[3], grid[3];
#if CUDA_MAJOR < 13
    int clock_khz;
#endif
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
#if CUDA_MAJOR < 13
    int device_overlap;
#endif
    int processors;
#if CUDA_MAJOR < 13
    int kernel_timeout;
#endif
    int integrated, maps_host_memory;
#if CUDA_MAJOR < 13
    int compute_mode;
#endif
    int textures_and_surfaces[CUDA_MAJOR < 13 ? 40 : 39];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, engines, unified;
#if CUDA_MAJOR < 13
    int memory_clock_khz;
#endif
    int bus_width, l2_bytes, persisting_l2, threads_per_processor, priorities, global_l1, local_l1;
    size_t shared_per_processor;
    int registers_per_processor, managed, multi_gpu, multi_gpu_group, native_atomics;
#if CUDA_MAJOR < 13
    int single_to_double;
#endif
    int pageable, concurrent_managed, preemption, host_pointer, cooperative;
#if CUDA_MAJOR < 13
    int cooperative_multi;
#endif
    size_t shared_per_block_optin;
    int pageable_by_tables, direct_managed, blocks_per_processor, access_policy;
    size_t shared_reserved;
    int register_host, sparse, register_read_only, semaphores, memory_pools, gdr;
    unsigned gdr_flush;
    int gdr_order;
    unsigned pool_handles;
    int deferred, ipc_events, cluster, unified_pointers;
    int rest[63];
};
#if CUDA_MAJOR == 12
static_assert(sizeof(DeviceProp) == 1032);
#endif

void pci(int device, int *domain, int *bus, int *slot) {
    *domain = *bus = *slot = 0;
    sscanf(described(device).pci_address.c_str(), "%x:%x:%x", (unsigned *)domain, (unsigned *)bus,
           (unsigned *)slot);
}

int checked(int device) {
    return device < 0 || device >= (int)visible().size() ? INVALID_DEVICE : OK;
}

}  // namespace

int fail(int error) {
    if (error) last_error = error;
    return error;
}

extern "C" {

API int cudaGetLastError() {
    const int error = last_error;
    last_error = OK;
    return error;
}
API int cudaPeekAtLastError() { return last_error; }
API const char *cudaGetErrorName(int error) { return text_of(error).runtime_name; }
API const char *cudaGetErrorString(int error) { return text_of(error).text; }

API int cudaGetDeviceCount(int *count) {
    *count = 0;
    // A driver of an older CUDA; 0: none that the process finds.
    const bool is_described = !machine()->devices.empty();
    if (is_described && machine()->driver_version / 1000 < CUDA_VERSION_NUMBER / 1000) return fail(INSUFFICIENT_DRIVER);
    *count = (int)visible().size();
    return *count ? OK : fail(NO_DEVICE);
}
API int cudaGetDevice(int *device) {
    *device = current_device;
    return OK;
}
API int cudaSetDevice(int device) {
    if (int error = checked(device)) return fail(error);
    current_device = device;
    return fail(state(device));
}
API int cudaSetDeviceFlags(unsigned) { return OK; }
API int cudaGetDeviceFlags(unsigned *flags) {
    *flags = 0;
    return OK;
}

// An H100's limits, whatever the device is called: no kernel runs that would need them.
static int properties(DeviceProp *p, int device) {
    if (int error = checked(device)) return fail(error);
    const Device played = described(device);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", played.name.c_str());
    uuid_bytes(device, p->uuid);
    pci(device, &p->pci_domain, &p->pci_bus, &p->pci_device);
    p->total_memory = played.memory_bytes;
    p->major = played.major;
    p->minor = played.minor;
    p->processors = played.processors;
    p->shared_per_block = 49152;
    p->registers_per_block = p->registers_per_processor = p->constant_memory = 65536;
    p->warp_size = 32;
    p->pitch = p->grid[0] = 2147483647;
    p->threads_per_block = p->threads_dim[0] = p->threads_dim[1] = 1024;
    p->threads_dim[2] = 64;
    p->grid[1] = p->grid[2] = 65535;
    p->texture_alignment = 512;
    p->maps_host_memory = p->concurrent_kernels = p->ecc = p->unified = p->priorities = 1;
    p->cooperative = p->memory_pools = 1;
    p->engines = 3;
    p->bus_width = 5120;
    p->l2_bytes = 50 << 20;
    p->threads_per_processor = 2048;
    p->shared_per_processor = 233472;
    p->shared_per_block_optin = 232448;
    p->blocks_per_processor = 32;
    p->shared_reserved = 1024;
    return OK;
}
API int cudaGetDeviceProperties(DeviceProp *p, int device) { return properties(p, device); }
API int cudaGetDeviceProperties_v2(DeviceProp *p, int device) { return properties(p, device); }

API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    DeviceProp p;
    if (int error = properties(&p, device)) return error;
    switch (attribute) {  // enum cudaDeviceAttr
        case 1: *value = p.threads_per_block; break;
        case 2: case 3: case 4: *value = p.threads_dim[attribute - 2]; break;
        case 5: case 6: case 7: *value = p.grid[attribute - 5]; break;
        case 8: *value = (int)p.shared_per_block; break;
        case 9: *value = (int)p.constant_memory; break;
        case 10: *value = p.warp_size; break;
        case 12: *value = p.registers_per_block; break;
        case 13: *value = 1980000; break;  // kHz
        case 16: *value = p.processors; break;
        case 33: *value = p.pci_bus; break;
        case 34: *value = p.pci_device; break;
        case 36: *value = 2619000; break;  // kHz, of the memory
        case 37: *value = p.bus_width; break;
        case 38: *value = p.l2_bytes; break;
        case 39: *value = p.threads_per_processor; break;
        case 50: *value = p.pci_domain; break;
        case 75: *value = p.major; break;
        case 76: *value = p.minor; break;
        case 81: *value = (int)p.shared_per_processor; break;
        case 82: *value = p.registers_per_processor; break;
        case 97: *value = (int)p.shared_per_block_optin; break;
        case 106: *value = p.blocks_per_processor; break;
        case 31: case 32: case 40: case 41: case 78: case 95: case 115: *value = 1; break;
        default: *value = 0;
    }
    return OK;
}
API int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    if (int error = checked(device)) return fail(error);
    snprintf(text, (size_t)length, "%s", described(device).pci_address.c_str());
    for (char *c = text; *c; c++) *c = (char)toupper(*c);
    return OK;
}
API int cudaDeviceGetByPCIBusId(int *device, const char *text) {
    for (int i = 0; i < (int)visible().size(); i++)
        if (!strcasecmp(described(i).pci_address.c_str(), text)) {
            *device = i;
            return OK;
        }
    return fail(INVALID_DEVICE);
}
API int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return OK;
}
API int cudaDeviceEnablePeerAccess(int peer, unsigned) {
    for (int device : {current_device, peer})
        if (auto refused = fault_of(device, "peer_error")) return fail((int)refused->value);
    return OK;
}
API int cudaDeviceDisablePeerAccess(int) { return OK; }
API int cudaDriverGetVersion(int *version) {
    *version = machine()->driver_version;
    return OK;
}
API int cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_NUMBER;
    return OK;
}
}
