// SPDX-License-Identifier: Apache-2.0
#include "nccl.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace played::nccl {
namespace {

constexpr int POLL_MS = 20;
constexpr size_t LARGE_BYTES = 4 << 10;
std::atomic<long> exchanges[MOST_DEVICES], received_large[MOST_DEVICES];

enum Direction { SEND, RECEIVE };

// What is still to be done with one peer, each way in the order in which it was asked for.
struct Queue {
    std::vector<Part> parts[2];
    size_t next[2] = {0, 0};
};

enum class Moved { ALL, WAITS, BROKEN };

Moved move(int fd, Queue &queue, Direction direction) {
    auto &parts = queue.parts[direction];
    for (size_t &at = queue.next[direction]; at < parts.size();) {
        Part &part = parts[at];
        const ssize_t moved = direction == RECEIVE ? recv(fd, part.data, part.size, 0)
                                                   : send(fd, part.data, part.size, MSG_NOSIGNAL);
        if (moved > 0) {
            part.data += moved;
            part.size -= (size_t)moved;
            if (!part.size) at++;
        } else if (moved < 0 && errno == EAGAIN) {
            return Moved::WAITS;
        } else if (moved == 0 || errno != EINTR) {
            return Moved::BROKEN;
        }
    }
    return Moved::ALL;
}

bool peer_is_gone(Comm &comm, int peer) {
    if (comm.error == SUCCESS) {
        log(comm, Level::WARN, "socketProgress: Connection closed by remote peer " + std::to_string(peer));
        comm.error = REMOTE_ERROR;
    }
    comm.wait_for_abort();
    return false;
}

bool move_all(Comm &comm, std::vector<Queue> &queues) {
    while (!comm.must_end()) {
        std::vector<pollfd> waiting;
        for (int peer = 0; peer < comm.size; peer++) {
            short events = 0;
            for (Direction direction : {SEND, RECEIVE}) {
                const Moved moved = move(comm.data[peer], queues[peer], direction);
                if (moved == Moved::BROKEN) return peer_is_gone(comm, peer);
                if (moved == Moved::WAITS) events |= direction == SEND ? POLLOUT : POLLIN;
            }
            if (events) waiting.push_back({comm.data[peer], events, 0});
        }
        if (waiting.empty()) return true;
        poll(waiting.data(), waiting.size(), POLL_MS);
    }
    return false;
}

// What strikes a device's communication, by how many exchanges it has done. False: it is over.
bool is_struck(Comm &comm, long number) {
    if (auto signal = fault_of(comm.device, "strike_collective"); signal && number > signal->after)
        kill(getpid(), (int)signal->value);
    if (auto drop = fault_of(comm.device, "link_drop"); drop && number > drop->after)
        for (int fd : comm.data)
            if (fd >= 0) shutdown(fd, SHUT_RDWR);
    if (auto error = fault_of(comm.device, "nccl_async_error"); error && number > error->after) {
        log(comm, Level::WARN, "played: asynchronous error " + std::to_string((int)error->value));
        comm.error = (int)error->value;
        comm.wait_for_abort();
        return true;
    }
    return false;
}

void flip_a_bit(const Comm &comm, const std::vector<Part> &receives) {
    auto flip = fault_of(comm.device, "link_flip");
    if (!flip) return;
    for (auto &part : receives)
        if (part.peer != comm.rank && part.size > LARGE_BYTES &&
            ++received_large[comm.device] % std::max(1L, (long)flip->value) == 0)
            part.data[part.size / 2] ^= 4;
}

double link_seconds(const Comm &comm, const std::vector<Part> &sends, const std::vector<Part> &receives) {
    double speed = described(comm.device).link_gb_per_s;
    if (auto slow = fault_of(comm.device, "link_slow")) speed = slow->value;
    auto bytes = [&](const std::vector<Part> &parts) {
        size_t sum = 0;
        for (auto &part : parts) sum += part.peer == comm.rank ? 0 : part.size;
        return (double)sum;
    };
    return speed > 0 ? std::max(bytes(sends), bytes(receives)) / speed / 1e9 : 0;
}

}  // namespace

bool exchange(Comm &comm, std::vector<Part> sends, std::vector<Part> receives) {
    const double begun_s = monotonic_s();
    if (is_struck(comm, ++exchanges[comm.device])) return false;
    std::vector<Queue> queues((size_t)comm.size);
    std::vector<Part> own[2];
    for (Direction direction : {SEND, RECEIVE})
        for (auto &part : direction == SEND ? sends : receives) {
            if (part.peer == comm.rank) own[direction].push_back(part);
            else if (part.size) queues[(size_t)part.peer].parts[direction].push_back(part);
        }
    for (size_t i = 0; i < own[SEND].size() && i < own[RECEIVE].size(); i++)
        memmove(own[RECEIVE][i].data, own[SEND][i].data, own[RECEIVE][i].size);
    if (!move_all(comm, queues)) return false;
    flip_a_bit(comm, receives);
    sleep_s(link_seconds(comm, sends, receives) - (monotonic_s() - begun_s));
    return true;
}

}  // namespace played::nccl
