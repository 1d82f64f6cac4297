// SPDX-License-Identifier: Apache-2.0
// The collectives, and sending and receiving: each is work of a stream.
#include "nccl.h"

#include <chrono>
#include <utility>

using namespace played;
using namespace played::nccl;

namespace {

struct Operation {
    Comm *comm;
    Stream *stream;
    std::function<void(Comm &)> run;  // empty: it is a part that is sent or received
    bool is_sent;
    Part part;
};
thread_local int depth = 0;
thread_local std::vector<Operation> group;

constexpr std::chrono::milliseconds LOOK_AGAIN{20};

// Counts a communicator's work until it is done, or was dropped because its device is lost.
struct Pending {
    explicit Pending(Comm *comm) : comm(comm->shared_from_this()) {
        comm->pending++;
        std::lock_guard<std::mutex> lock(comm->turns);
        comm->given.insert(number = comm->numbers++);
    }
    ~Pending() {
        std::lock_guard<std::mutex> lock(comm->turns);
        comm->given.erase(number);
        comm->turn.notify_all();
        comm->pending--;
    }
    void await_turn() {
        std::unique_lock<std::mutex> lock(comm->turns);
        while (*comm->given.begin() != number && !comm->must_end()) comm->turn.wait_for(lock, LOOK_AGAIN);
    }
    std::shared_ptr<Comm> comm;
    long number;
};

void submit(Comm *comm, Stream *stream, std::function<void(Comm &)> run) {
    begin_on(stream);
    auto pending = std::make_shared<Pending>(comm);
    stream->put([pending, run = std::move(run)] {
        Comm &comm = *pending->comm;
        pending->await_turn();
        std::lock_guard<std::mutex> lock(comm.order);
        comm.running++;
        if (!comm.must_end()) run(comm);
        comm.running--;
    }, true);
}

// What a group sends and receives on one stream is one exchange.
void submit_parts(const std::vector<Operation> &all, Comm *comm, Stream *stream) {
    std::vector<Part> sends, receives;
    for (auto &each : all)
        if (!each.run && each.comm == comm && each.stream == stream)
            (each.is_sent ? sends : receives).push_back(each.part);
    submit(comm, stream, [=](Comm &c) { exchange(c, Kind::SEND, sends, receives); });
}

int flush() {
    const auto operations = std::move(group);
    group.clear();
    std::vector<std::pair<Comm *, Stream *>> submitted;
    for (auto &each : operations) {
        if (each.run) {
            submit(each.comm, each.stream, each.run);
            continue;
        }
        const auto key = std::make_pair(each.comm, each.stream);
        bool is_new = true;
        for (auto &other : submitted) is_new &= other != key;
        if (!is_new) continue;
        submitted.push_back(key);
        submit_parts(operations, each.comm, each.stream);
    }
    return SUCCESS;
}

int put(Operation operation) {
    if (!operation.comm) return INVALID_ARGUMENT;
    const int error = operation.comm->error;
    if (error && error != IN_PROGRESS) return error;
    if (state(operation.stream->device)) return CUDA_ERROR;
    group.push_back(std::move(operation));
    return depth ? SUCCESS : flush();
}

int collective(Comm *comm, void *stream, std::function<void(Comm &)> run) {
    return put({comm, stream_of(stream), std::move(run), false, {}});
}
int part(Comm *comm, void *stream, bool is_sent, void *data, size_t size, int peer) {
    return put({comm, stream_of(stream), nullptr, is_sent, {peer, (char *)data, size}});
}

// Send a part of `in` to each, `step` bytes after the one before; receive one of each into `out`.
bool all_to_all(Comm &comm, Kind kind, const char *in, size_t step, char *out, size_t size) {
    std::vector<Part> sends, receives;
    for (int peer = 0; peer < comm.size; peer++) {
        sends.push_back({peer, (char *)in + (size_t)peer * step, size});
        receives.push_back({peer, out + (size_t)peer * size, size});
    }
    return exchange(comm, kind, sends, receives);
}

void reduce_received(Comm &comm, void *out, const std::vector<char> &received, size_t count, int type, int operation) {
    auto scale = comm.scales.find(operation);
    reduce((char *)out, received.data(), count, comm.size, type, operation, scale == comm.scales.end() ? 1 : scale->second);
}

}  // namespace

extern "C" {

API int ncclGroupStart() {
    depth++;
    return SUCCESS;
}
API int ncclGroupEnd() { return --depth ? (int)SUCCESS : flush(); }
API int ncclGroupSimulateEnd(void *) {
    depth--;
    group.clear();
    return SUCCESS;
}

API int ncclAllGather(const void *in, void *out, size_t count, int type, Comm *comm, void *stream) {
    return collective(comm, stream, [=](Comm &c) {
        const size_t size = count * bytes_of(type);
        const std::vector<char> own((const char *)in, (const char *)in + size);  // may lie in `out`
        all_to_all(c, Kind::ALL_GATHER, own.data(), 0, (char *)out, size);
    });
}
API int ncclAllReduce(const void *in, void *out, size_t count, int type, int operation, Comm *comm, void *stream) {
    return collective(comm, stream, [=](Comm &c) {
        std::vector<char> received(count * bytes_of(type) * (size_t)c.size);
        if (all_to_all(c, Kind::ALL_REDUCE, (const char *)in, 0, received.data(), count * bytes_of(type)))
            reduce_received(c, out, received, count, type, operation);
    });
}
API int ncclReduceScatter(const void *in, void *out, size_t count, int type, int operation, Comm *comm, void *stream) {
    return collective(comm, stream, [=](Comm &c) {
        const size_t size = count * bytes_of(type);
        std::vector<char> received(size * (size_t)c.size);
        if (all_to_all(c, Kind::REDUCE_SCATTER, (const char *)in, size, received.data(), size))
            reduce_received(c, out, received, count, type, operation);
    });
}
API int ncclAlltoAll(const void *in, void *out, size_t count, int type, Comm *comm, void *stream) {
    return collective(comm, stream, [=](Comm &c) {
        const size_t size = count * bytes_of(type);
        all_to_all(c, Kind::ALL_TO_ALL, (const char *)in, size, (char *)out, size);
    });
}
API int ncclReduce(const void *in, void *out, size_t count, int type, int operation, int root, Comm *comm, void *stream) {
    return collective(comm, stream, [=](Comm &c) {
        const size_t size = count * bytes_of(type);
        std::vector<char> received(c.rank == root ? size * (size_t)c.size : 0);
        std::vector<Part> receives;
        for (int peer = 0; peer < c.size && c.rank == root; peer++)
            receives.push_back({peer, received.data() + (size_t)peer * size, size});
        if (exchange(c, Kind::REDUCE, {{root, (char *)in, size}}, receives) && c.rank == root)
            reduce_received(c, out, received, count, type, operation);
    });
}
API int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, Comm *comm, void *stream) {
    return collective(comm, stream, [=](Comm &c) {
        const size_t size = count * bytes_of(type);
        std::vector<Part> sends;
        for (int peer = 0; peer < c.size && c.rank == root; peer++) sends.push_back({peer, (char *)in, size});
        exchange(c, Kind::BROADCAST, sends, {{root, (char *)out, size}});
    });
}
API int ncclBcast(void *data, size_t count, int type, int root, Comm *comm, void *stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}
API int ncclSend(const void *data, size_t count, int type, int peer, Comm *comm, void *stream) {
    return part(comm, stream, true, (void *)data, count * bytes_of(type), peer);
}
API int ncclRecv(void *data, size_t count, int type, int peer, Comm *comm, void *stream) {
    return part(comm, stream, false, data, count * bytes_of(type), peer);
}
API int ncclRedOpCreatePreMulSum(int *operation, void *value, int type, int, Comm *comm) {
    *operation = comm->next_operation++;
    comm->scales[*operation] = scalar(value, type);
    return SUCCESS;
}
API int ncclRedOpDestroy(int, Comm *) { return SUCCESS; }
}
