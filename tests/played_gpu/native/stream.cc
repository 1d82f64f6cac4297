// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include "device.h"

#include <algorithm>
#include <atomic>
#include <dlfcn.h>
#include <thread>
#include <vector>

namespace played {
namespace {

constexpr double LOOK_AGAIN_S = 0.02;
constexpr double FALLING_S = 0.05;

std::mutex &streams_mutex = *new std::mutex;
auto &streams = *new std::vector<Stream *>;
Stream *defaults[MOST_DEVICES];
std::atomic<bool> stopped{false};

struct Python {
    int (*is_initialized)() = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    int (*holds_lock)() = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    void *(*save)() = (void *(*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    void (*restore)(void *) = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
};
const Python &python() {
    static const Python found;
    return found;
}

}  // namespace

WithoutPython::WithoutPython() {
    const Python &py = python();
    if (py.save && py.is_initialized() && py.holds_lock()) saved_ = py.save();
}

WithoutPython::~WithoutPython() {
    if (saved_) python().restore(saved_);
}

void Stream::put(std::function<void()> work, bool may_block) {
    enqueue({std::move(work), false, monotonic_s()}, may_block);
}

void Stream::put_always(std::function<void()> work) { enqueue({std::move(work), true, monotonic_s()}, false); }

void Stream::run(const Entry &entry) {
    asked_s_ = entry.asked_s;
    is_timed_ = entry.always;  // a mark takes no time
    entry.work();
    if (!is_timed_) reach(monotonic_s());
}

void Stream::pass(double seconds, double begun_before_s) {
    reach(std::max(clock_s_, asked_s_ - begun_before_s) + seconds);
    sleep_s(clock_s_ - monotonic_s());
}

void Stream::reach(double moment_s) {
    clock_s_ = std::max(clock_s_, moment_s);
    is_timed_ = true;
}

double Stream::moment() const { return std::max(clock_s_, asked_s_); }

void Stream::enqueue(Entry entry, bool may_block) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!may_block && submitted_ == done_) {
        if (entry.always || !is_lost(device)) run(entry);
        return;
    }
    queue_.push_back(std::move(entry));
    submitted_++;
    if (!started_) {
        started_ = true;
        std::thread([this] { loop(); }).detach();
    }
    changed_.notify_all();
}

void Stream::loop() {
    current_device = device;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return !queue_.empty() || closing_; });
        if (queue_.empty()) break;
        Entry entry = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        if (!stopped && (entry.always || !is_lost(device))) run(entry);
        entry.work = nullptr;  // what it holds is freed by this thread, before it counts as done
        lock.lock();
        done_++;
        changed_.notify_all();
    }
    lock.unlock();
    delete this;
}

bool Stream::is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return submitted_ == done_;
}

void Stream::wait() {
    if (is_idle()) return;
    WithoutPython others_run;
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t target = submitted_;
    changed_.wait(lock, [&] { return done_ >= target; });
}

void Stream::close() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!started_) {
        lock.unlock();
        delete this;
        return;
    }
    closing_ = true;
    changed_.notify_all();
}

Stream *new_stream(int device, int priority) {
    auto *made = new Stream(device, priority);
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.push_back(made);
    return made;
}

void destroy(Stream *stream) {
    {
        std::lock_guard<std::mutex> lock(streams_mutex);
        streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
    }
    stream->close();
}

Stream *stream_of(void *handle) {
    if ((uintptr_t)handle > 2) return static_cast<Stream *>(handle);
    std::lock_guard<std::mutex> lock(streams_mutex);
    Stream *&found = defaults[current_device];
    if (!found) streams.push_back(found = new Stream(current_device, 0));
    return found;
}

void wait_for_all(int device) {
    std::vector<Stream *> waited;
    {
        std::lock_guard<std::mutex> lock(streams_mutex);
        for (auto *stream : streams)
            if (stream->device == device) waited.push_back(stream);
    }
    for (auto *stream : waited) stream->wait();
}

bool begin_on(Stream *stream) {
    const int device = stream->device;
    const Struck struck = begin_operation(device);
    if (struck == Struck::HANGS)
        stream->put([device] {
            for (; is_hanging(device) && !is_lost(device); sleep_s(LOOK_AGAIN_S)) spin(device);
        }, true);
    if (struck == Struck::FALLS)
        stream->put([device] { sleep_s(FALLING_S); lose(device, LAUNCH_FAILURE); }, true);
    return stream->is_idle();
}

void put_operation(Stream *stream, std::function<void()> work, double modelled_s, bool may_block) {
    begin_on(stream);
    const int device = stream->device;
    stream->put([=] {
        const double begun_s = monotonic_s();
        work();
        stream->pass(device_seconds(device, monotonic_s() - begun_s, modelled_s), 0);
    }, may_block || modelled_s > 0 || is_slowed(device));
}

void put_rest(Stream *stream, double cpu_s, double modelled_s) {
    const int device = stream->device;
    if (modelled_s > cpu_s || is_slowed(device))
        stream->put([=] { stream->pass(device_seconds(device, cpu_s, modelled_s), cpu_s); }, true);
    else
        device_seconds(device, cpu_s, modelled_s);
}

void stop_all() { stopped = true; }

// ---- events

namespace {
std::mutex &events_mutex = *new std::mutex;
std::condition_variable &event_reached = *new std::condition_variable;
}  // namespace

int Event::record(Stream *stream) {
    if (int error = state(stream->device)) return error;
    uint64_t number;
    {
        std::lock_guard<std::mutex> lock(events_mutex);
        number = ++mark_->recorded;
        mark_->device = stream->device;
    }
    stream->put_always([stream, mark = mark_, number] {
        std::lock_guard<std::mutex> lock(events_mutex);
        if (mark->done < number) {
            mark->done = number;
            mark->at_s = stream->moment();
        }
        event_reached.notify_all();
    });
    return OK;
}

int Event::query() const {
    std::lock_guard<std::mutex> lock(events_mutex);
    if (mark_->recorded && is_lost(mark_->device)) return state(mark_->device);
    return mark_->done >= mark_->recorded ? OK : NOT_READY;
}

int Event::wait() const {
    std::unique_lock<std::mutex> lock(events_mutex);
    const uint64_t number = mark_->recorded;
    if (mark_->done < number) {
        lock.unlock();
        WithoutPython others_run;
        lock.lock();
        event_reached.wait(lock, [&] { return mark_->done >= number; });
        lock.unlock();  // before Python's own lock is waited for
    }
    return number && is_lost(mark_->device) ? state(mark_->device) : OK;
}

void Event::have_wait(Stream *stream) const {
    std::unique_lock<std::mutex> lock(events_mutex);
    const uint64_t number = mark_->recorded;
    if (mark_->done >= number) return;
    lock.unlock();
    stream->put([stream, mark = mark_, number] {
        std::unique_lock<std::mutex> lock(events_mutex);
        event_reached.wait(lock, [&] { return mark->done >= number; });
        stream->reach(mark->at_s);
    }, true);
}

int Event::elapsed_ms(const Event &begin, const Event &end, float *ms) {
    std::lock_guard<std::mutex> lock(events_mutex);
    if (!begin.mark_->recorded || !end.mark_->recorded) return INVALID_HANDLE;
    if (is_lost(end.mark_->device)) return state(end.mark_->device);
    if (begin.mark_->done < begin.mark_->recorded || end.mark_->done < end.mark_->recorded) return NOT_READY;
    *ms = (float)((end.mark_->at_s - begin.mark_->at_s) * 1e3);
    return OK;
}

}  // namespace played
