// SPDX-License-Identifier: Apache-2.0
#include "nccl.h"

#include <arpa/inet.h>
#include <cerrno>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace played::nccl {
namespace {

constexpr int POLL_MS = 50;
constexpr int ATTEMPTS = 100;  // of a connection, one every 50 ms
constexpr int BACKLOG = 4096;

sockaddr_in internet(const std::string &address, uint16_t port) {
    sockaddr_in made{};
    made.sin_family = AF_INET;
    made.sin_addr.s_addr = inet_addr(address.c_str());
    made.sin_port = htons(port);
    return made;
}

int prepared(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    return fd;
}

// Whether to go on after a call that moved no data; waits for a moment if so.
bool may_go_on(int fd, ssize_t moved, short event, const std::atomic<bool> *stop) {
    if (moved == 0 || (errno != EAGAIN && errno != EINTR)) return false;
    pollfd polled{fd, event, 0};
    poll(&polled, 1, POLL_MS);
    return !stop || !*stop;
}

}  // namespace

std::string own_address() { return machine()->address; }

int listen_on(const std::string &address, uint16_t *port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in here = internet(address, 0);
    socklen_t size = sizeof here;
    if (bind(fd, (sockaddr *)&here, size) || listen(fd, BACKLOG) || getsockname(fd, (sockaddr *)&here, &size)) {
        close(fd);
        return -1;
    }
    *port = ntohs(here.sin_port);
    return fd;
}

int connect_to(const std::string &address, uint16_t port) {
    const sockaddr_in there = internet(address, port);
    for (int i = 0; i < ATTEMPTS; i++) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (!connect(fd, (const sockaddr *)&there, sizeof there)) return prepared(fd);
        close(fd);
        sleep_s(POLL_MS / 1e3);
    }
    return -1;
}

int accept_from(int listener, const std::atomic<bool> *stop) {
    for (;;) {
        pollfd polled{listener, POLLIN, 0};
        const int ready = poll(&polled, 1, POLL_MS);
        if (stop && *stop) return -1;
        const int fd = ready > 0 ? accept(listener, nullptr, nullptr) : -1;
        if (fd >= 0) return prepared(fd);
    }
}

bool send_all(int fd, const void *data, size_t size, const std::atomic<bool> *stop) {
    for (auto *next = (const char *)data; size;) {
        const ssize_t moved = send(fd, next, size, MSG_NOSIGNAL);
        if (moved > 0) next += moved, size -= (size_t)moved;
        else if (!may_go_on(fd, moved, POLLOUT, stop)) return false;
    }
    return true;
}

bool receive_all(int fd, void *data, size_t size, const std::atomic<bool> *stop) {
    for (auto *next = (char *)data; size;) {
        const ssize_t moved = recv(fd, next, size, 0);
        if (moved > 0) next += moved, size -= (size_t)moved;
        else if (!may_go_on(fd, moved, POLLIN, stop)) return false;
    }
    return true;
}

}  // namespace played::nccl
