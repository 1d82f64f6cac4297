// SPDX-License-Identifier: Apache-2.0
#include "nccl.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace played::nccl {
namespace {

constexpr int POLL_MS = 20;
constexpr size_t LARGE_BYTES = 4 << 10;
std::atomic<long> exchanges[MOST_DEVICES];

enum Direction { SEND, RECEIVE };

// What goes ahead of each part.
struct Head {
    uint64_t size;
    Kind kind;
    uint32_t unused;
};

// A part, and how far it has come.
struct Message {
    Part part;
    Head head;
    size_t head_moved = 0, moved = 0;

    bool has_head() const { return head_moved == sizeof head; }
};

// What is still to be done with one peer, each way in the order in which it was asked for.
struct Queue {
    std::vector<Message> messages[2];
    size_t next[2] = {0, 0};
};

enum class Moved { ALL, WAITS, NEVER, BROKEN };

ssize_t send_more(int fd, const Message &message) {
    iovec pieces[] = {
        {(char *)&message.head + message.head_moved, sizeof message.head - message.head_moved},
        {message.part.data + message.moved, message.part.size - message.moved},
    };
    msghdr all{};
    all.msg_iov = pieces;
    all.msg_iovlen = 2;
    return sendmsg(fd, &all, MSG_NOSIGNAL);
}

// What was sent beyond what is awaited is read, and dropped.
ssize_t receive_more(int fd, Message &message) {
    char surplus[4096];
    if (!message.has_head()) return recv(fd, (char *)&message.head + message.head_moved, sizeof message.head - message.head_moved, 0);
    const size_t awaited = std::min(message.part.size, (size_t)message.head.size);
    if (message.moved < awaited) return recv(fd, message.part.data + message.moved, awaited - message.moved, 0);
    return recv(fd, surplus, std::min(sizeof surplus, (size_t)message.head.size - message.moved), 0);
}

void has_moved(Message &message, size_t bytes) {
    const size_t of_head = std::min(bytes, sizeof message.head - message.head_moved);
    message.head_moved += of_head;
    message.moved += bytes - of_head;
}

Moved move(int fd, Queue &queue, Direction direction, Kind kind) {
    auto &messages = queue.messages[direction];
    for (size_t &at = queue.next[direction]; at < messages.size();) {
        Message &message = messages[at];
        if (message.has_head()) {
            if (message.head.kind != kind) return Moved::NEVER;
            if (message.moved == message.head.size) {
                if (message.part.size > message.head.size) return Moved::NEVER;
                at++;
                continue;
            }
        }
        const ssize_t moved = direction == RECEIVE ? receive_more(fd, message) : send_more(fd, message);
        if (moved > 0) has_moved(message, (size_t)moved);
        else if (moved < 0 && errno == EAGAIN) return Moved::WAITS;
        else if (moved == 0 || errno != EINTR) return Moved::BROKEN;
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

// Of one that waits for what never comes, only the end of the peer is seen.
short events_of(Moved moved, Direction direction) {
    if (moved == Moved::NEVER) return POLLRDHUP;
    return moved == Moved::ALL ? 0 : direction == SEND ? POLLOUT : POLLIN;
}

bool move_all(Comm &comm, Kind kind, std::vector<Queue> &queues) {
    while (!comm.must_end()) {
        std::vector<pollfd> waiting;
        std::vector<int> peers;
        for (int peer = 0; peer < comm.size; peer++) {
            short events = 0;
            for (Direction direction : {SEND, RECEIVE}) {
                const Moved moved = move(comm.data[peer], queues[peer], direction, kind);
                if (moved == Moved::BROKEN) return peer_is_gone(comm, peer);
                events |= events_of(moved, direction);
            }
            if (!events) continue;
            waiting.push_back({comm.data[peer], events, 0});
            peers.push_back(peer);
        }
        if (waiting.empty()) return true;
        spin(comm.device);
        poll(waiting.data(), waiting.size(), POLL_MS);
        for (size_t i = 0; i < waiting.size(); i++)
            if (waiting[i].revents & POLLRDHUP) return peer_is_gone(comm, peers[i]);
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
    for (auto &part : receives)
        if (part.peer != comm.rank && part.size > LARGE_BYTES && is_message_wrong(comm.device))
            part.data[part.size / 2] ^= 4;
}

double link_seconds(const Comm &comm, const std::vector<Part> &sends, const std::vector<Part> &receives) {
    auto bytes = [&](const std::vector<Part> &parts) {
        size_t sum = 0;
        for (auto &part : parts) sum += part.peer == comm.rank ? 0 : part.size;
        return (double)sum;
    };
    return played::link_seconds(comm.device, std::max(bytes(sends), bytes(receives)));
}

}  // namespace

bool exchange(Comm &comm, Kind kind, std::vector<Part> sends, std::vector<Part> receives) {
    const double begun_s = monotonic_s();
    if (is_struck(comm, ++exchanges[comm.device])) return false;
    std::vector<Queue> queues((size_t)comm.size);
    std::vector<Part> own[2];
    for (Direction direction : {SEND, RECEIVE})
        for (auto &part : direction == SEND ? sends : receives) {
            if (part.peer == comm.rank) own[direction].push_back(part);
            else if (part.size) queues[(size_t)part.peer].messages[direction].push_back({part, {part.size, kind, 0}});
        }
    for (size_t i = 0; i < own[SEND].size() && i < own[RECEIVE].size(); i++)
        memmove(own[RECEIVE][i].data, own[SEND][i].data, own[RECEIVE][i].size);
    if (!move_all(comm, kind, queues)) return false;
    flip_a_bit(comm, receives);
    sleep_s(link_seconds(comm, sends, receives) - (monotonic_s() - begun_s));
    return true;
}

}  // namespace played::nccl
