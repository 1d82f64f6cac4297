// SPDX-License-Identifier: Apache-2.0
// Streams are queues, each with a thread of its own. Each has the device's own clock: by that an
// operation begins when it was asked for, or when the one before has ended, and takes as long as
// described, however late the machine's cores come to it. Events are moments of that clock.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace played {

// Let other Python threads run while this one waits: on a device, what a stream has queued needs no
// interpreter, but here it may. Nothing happens where there is no Python.
class WithoutPython {
  public:
    WithoutPython();
    ~WithoutPython();

  private:
    void *saved_ = nullptr;
};

class Stream {
  public:
    Stream(int device, int priority) : device(device), priority(priority) {}

    // Run this after all that is queued. What cannot block runs at once if nothing is queued. Once
    // the device is lost, work is dropped.
    void put(std::function<void()> work, bool may_block);
    // The same for what must run on a lost device too: marks of events, functions of the host.
    void put_always(std::function<void()> work);
    bool is_idle();
    void wait();
    void close();  // it ends, and is freed, once its queue is empty

    // For what is queued, while it runs. `pass` has it take so long by the device's clock, of which
    // it may have begun so much before it was queued, and returns once that time has come. What
    // calls neither took as long as the CPU.
    void pass(double seconds, double begun_before_s);
    void reach(double moment_s);
    double moment() const;

    const int device, priority;

  private:
    struct Entry {
        std::function<void()> work;
        bool always;
        double asked_s;
    };
    void run(const Entry &entry);
    void enqueue(Entry entry, bool may_block);
    void loop();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Entry> queue_;
    uint64_t submitted_ = 0, done_ = 0;
    bool started_ = false, closing_ = false;
    double clock_s_ = 0, asked_s_ = 0;
    bool is_timed_ = false;
};

Stream *new_stream(int device, int priority);
void destroy(Stream *stream);
// CUDA's handle: 0, 1 and 2 are the default streams of the current device.
Stream *stream_of(void *handle);
void wait_for_all(int device);

// An operation of the device: counted, struck by faults, and as slow as the device is, which takes
// `modelled_s` for it; 0: as long as the CPU. `begin` counts it and returns how it has to go on.
void put_operation(Stream *stream, std::function<void()> work, double modelled_s, bool may_block);
bool begin_on(Stream *stream);  // true: the stream is idle, so it may run at once
void put_rest(Stream *stream, double cpu_s, double modelled_s);

// The end of a process: what is still queued is not run.
void stop_all();

class Event {
  public:
    int record(Stream *stream);
    int query() const;
    int wait() const;
    void have_wait(Stream *stream) const;
    static int elapsed_ms(const Event &begin, const Event &end, float *ms);

  private:
    struct Mark {
        uint64_t recorded = 0, done = 0;
        double at_s = 0;
        int device = 0;
    };
    std::shared_ptr<Mark> mark_ = std::make_shared<Mark>();
};

}  // namespace played
