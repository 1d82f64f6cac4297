// SPDX-License-Identifier: Apache-2.0
// What operators.py needs to run PyTorch's operators as work of a stream.
#include "device.h"
#include "stream.h"

#include <atomic>

#define API __attribute__((visibility("default")))

using namespace played;

namespace {
std::atomic<int> running{0};
}

extern "C" {

// Count an operation. 1: it may run at once; 0: it has to wait for the stream; 2: the device is lost.
API int played_begin(void *handle) {
    Stream *stream = stream_of(handle);
    if (state(stream->device)) return 2;
    return begin_on(stream);
}
// It has run on the CPU; `flop` and `bytes` say what a device would have taken.
API void played_end(void *handle, double cpu_s, double flop, double bytes) {
    Stream *stream = stream_of(handle);
    put_rest(stream, cpu_s, product_seconds(stream->device, flop) + copy_seconds(stream->device, bytes));
}
// Run it when the stream has come to it. `run` is a function of Python, and takes its lock.
API void played_put(void *handle, void (*run)(long), long number, double flop, double bytes) {
    Stream *stream = stream_of(handle);
    const int device = stream->device;
    const double modelled_s = product_seconds(device, flop) + copy_seconds(device, bytes);
    stream->put([=] {
        running++;
        const double begun_s = monotonic_s();
        run(number);
        running--;
        stream->pass(device_seconds(device, monotonic_s() - begun_s, modelled_s), 0);
    }, true);
}
// Whether a device that is seen has this fault now.
API int played_has_fault(const char *kind) {
    for (int device = 0; device < (int)visible().size(); device++)
        if (fault_of(device, kind)) return 1;
    return 0;
}
API void played_wait(void *handle) { stream_of(handle)->wait(); }
API int played_is_product_wrong(int device) { return is_product_wrong(device); }
API int played_is_memory_wrong(int device) { return is_memory_wrong(device); }
API double played_host_copy_seconds(int device, double bytes) { return host_copy_seconds(device, bytes); }
API double played_copy_seconds(int device, double bytes) { return copy_seconds(device, bytes); }
API double played_product_seconds(int device, double flop) { return product_seconds(device, flop); }
// An operator failed on the stream, as an assertion in a kernel does: the context is gone.
API void played_lose(int device) { lose(device, ASSERTION); }

// Before Python ends: nothing that is queued runs any more; what runs may end.
API void played_stop() {
    constexpr double LONGEST_S = 2;
    stop_all();
    for (double end_s = monotonic_s() + LONGEST_S; running && monotonic_s() < end_s;) sleep_s(0.001);
}
}
