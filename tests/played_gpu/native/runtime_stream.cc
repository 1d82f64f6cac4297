// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime: streams and events.
#include "runtime.h"

using namespace played;

extern "C" {

API int cudaStreamCreateWithPriority(void **stream, unsigned, int priority) {
    if (int error = state(current_device)) return fail(error);
    *stream = new_stream(current_device, priority);
    return OK;
}
API int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API int cudaStreamCreate(void **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API int cudaStreamDestroy(void *stream) {
    destroy(static_cast<Stream *>(stream));
    return OK;
}
API int cudaStreamQuery(void *handle) {
    Stream *stream = stream_of(handle);
    if (int error = state(stream->device)) return fail(error);
    return stream->is_idle() ? OK : NOT_READY;
}
API int cudaStreamSynchronize(void *handle) {
    Stream *stream = stream_of(handle);
    if (int error = state(stream->device)) return fail(error);
    stream->wait();
    return fail(state(stream->device));
}
API int cudaDeviceSynchronize() {
    if (int error = state(current_device)) return fail(error);
    wait_for_all(current_device);
    return fail(state(current_device));
}
API int cudaStreamGetPriority(void *stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return OK;
}
API int cudaStreamGetDevice(void *stream, int *device) {
    *device = stream_of(stream)->device;
    return OK;
}
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return OK;
}
API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
    stream_of(stream)->put([=] { function(argument); }, true);
    return OK;
}
API int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *argument, unsigned) {
    stream_of(stream)->put([=] { function(stream, OK, argument); }, true);
    return OK;
}

// Nothing is ever captured into a graph.
API int cudaStreamIsCapturing(void *, int *status) {
    *status = 0;
    return OK;
}
static int not_capturing(int *status, unsigned long long *id) {
    *status = 0;
    if (id) *id = 0;
    return OK;
}
API int cudaStreamGetCaptureInfo(void *, int *status, unsigned long long *id) { return not_capturing(status, id); }
API int cudaStreamGetCaptureInfo_v2(void *, int *status, unsigned long long *id) { return not_capturing(status, id); }
API int cudaStreamGetCaptureInfo_v3(void *, int *status, unsigned long long *id) { return not_capturing(status, id); }
API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    static thread_local int current = 0;
    const int before = current;
    current = *mode;
    *mode = before;
    return OK;
}

API int cudaEventCreateWithFlags(void **event, unsigned) {
    if (int error = state(current_device)) return fail(error);
    *event = new Event;
    return OK;
}
API int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
API int cudaEventDestroy(void *event) {
    delete static_cast<Event *>(event);
    return OK;
}
API int cudaEventRecord(void *event, void *stream) { return fail(static_cast<Event *>(event)->record(stream_of(stream))); }
API int cudaEventRecordWithFlags(void *event, void *stream, unsigned) { return cudaEventRecord(event, stream); }
API int cudaEventQuery(void *event) {
    const int answer = static_cast<Event *>(event)->query();
    return answer == NOT_READY ? answer : fail(answer);
}
API int cudaEventSynchronize(void *event) { return fail(static_cast<Event *>(event)->wait()); }
API int cudaEventElapsedTime(float *ms, void *begin, void *end) {
    const int answer = Event::elapsed_ms(*static_cast<Event *>(begin), *static_cast<Event *>(end), ms);
    return answer == NOT_READY ? answer : fail(answer);
}
API int cudaEventElapsedTime_v2(float *ms, void *begin, void *end) { return cudaEventElapsedTime(ms, begin, end); }
API int cudaStreamWaitEvent(void *stream, void *event, unsigned) {
    static_cast<Event *>(event)->have_wait(stream_of(stream));
    return OK;
}
}
