// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime: kernels. They are accepted and never run, because operators.py has PyTorch's
// operators run by the CPU's kernels instead.
#include "runtime.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <unordered_map>

using namespace played;

namespace {

struct Dim3 {
    unsigned x, y, z;
};
struct Launch {
    Dim3 grid, block;
    size_t shared;
    void *stream;
};
thread_local std::vector<Launch> launches;
auto &names = *new std::unordered_map<const void *, const char *>;

// Say which kernel does nothing: its operator is one that operators.py has missed.
int launched(const void *kernel) {
    if (is_verbose()) {
        auto found = names.find(kernel);
        fprintf(stderr, "played CUDA: no kernel runs: %s\n", found == names.end() ? "?" : found->second);
    }
    return fail(state(current_device));
}

int refused() { return NOT_SUPPORTED; }

}  // namespace

extern "C" {

API void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *kernel, char *, const char *name, int, void *, void *, void *, void *, int *) {
    if (is_verbose()) names[kernel] = name;
}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
API int __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return OK;
}
API unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *stream) {
    launches.push_back({grid, block, shared, stream});
    return 0;
}
API int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    const Launch last = launches.back();
    launches.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *stream = last.stream;
    return OK;
}
API int cudaLaunchKernel(const void *kernel, Dim3, Dim3, void **, size_t, void *) { return launched(kernel); }
API int __cudaLaunchKernel(const void *kernel, Dim3, Dim3, void **, size_t, void *) { return launched(kernel); }
API int cudaLaunchCooperativeKernel(const void *kernel, Dim3, Dim3, void **, size_t, void *) { return launched(kernel); }
API int cudaLaunchKernelExC(const void *, const void *kernel, void **) { return launched(kernel); }

API int cudaFuncGetAttributes(int *attributes, const void *) {  // struct cudaFuncAttributes
    constexpr int THREADS = 6, REGISTERS = 7, PTX = 8, BINARY = 9;
    memset(attributes, 0, 144);
    attributes[THREADS] = 1024;
    attributes[REGISTERS] = 32;
    attributes[PTX] = attributes[BINARY] = 90;
    return OK;
}
API int cudaFuncSetAttribute(const void *, int, int) { return OK; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
    *blocks = 1;
    return OK;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
    *blocks = 1;
    return OK;
}
API int cudaProfilerStart() { return OK; }
API int cudaProfilerStop() { return OK; }

// PyTorch takes what it needs of the driver through these, and fails on a null pointer.
static int entry_point(const char *name, void **function) {
    static void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : nullptr;
    if (!*function) *function = (void *)refused;
    return OK;
}
API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long, int *status) {
    if (status) *status = 0;
    return entry_point(name, function);
}
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long, int *status) {
    if (status) *status = 0;
    return entry_point(name, function);
}
}
