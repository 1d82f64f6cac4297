// SPDX-License-Identifier: Apache-2.0
// A communicator has a TCP connection to each peer; a collective is an exchange over them, done by
// the stream's thread, so that it is pending until the peers have come.
#pragma once
#include "device.h"
#include "stream.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define API __attribute__((visibility("default")))

namespace played::nccl {

enum Result { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };

struct UniqueId {
    char internal[128];
};
struct Config {  // the beginning of ncclConfig_t, the same since 2.14
    size_t size;
    unsigned magic, version;
    int blocking;
};

struct Comm : std::enable_shared_from_this<Comm> {
    ~Comm();
    void close_all();

    int rank = 0, size = 0, device = 0;
    std::vector<int> data, control;  // a connection to each peer; -1: to none
    std::atomic<bool> aborted{false};
    std::atomic<int> error{SUCCESS}, pending{0}, running{0};
    std::mutex order;  // one exchange at a time
    // Work that is not done, by number. It is done in the order in which it was given, whatever its
    // stream is: NCCL has the streams of a communicator wait for each other.
    std::set<long> given;
    long numbers = 0;
    std::mutex turns;
    std::condition_variable turn;
    std::map<int, double> scales;  // of the operations that were made by ncclRedOpCreatePreMulSum
    int next_operation = 5;

    bool must_end() const { return aborted || is_lost(device); }
    int version() const;
    // Wait as a kernel does that nobody tells that its peer is gone.
    void wait_for_abort() const;
};

// ---- sockets
int listen_on(const std::string &address, uint16_t *port);
int connect_to(const std::string &address, uint16_t port);
int accept_from(int listener, const std::atomic<bool> *stop);
bool send_all(int fd, const void *data, size_t size, const std::atomic<bool> *stop);
bool receive_all(int fd, void *data, size_t size, const std::atomic<bool> *stop);
std::string own_address();

// ---- what the node has; an error of NCCL's where it has not what the environment asks for
int find_interface(const Comm &comm);
int find_network(const Comm &comm);
int share_memory(const Comm &comm);

// ---- exchange
struct Part {
    int peer;
    char *data;
    size_t size;
};
enum class Kind : uint32_t { ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL, REDUCE, BROADCAST, SEND };
// Send and receive all of it. What a peer does not send never comes: nobody compares what ranks
// called. One that awaits more than the peer's call sends, or has called something else, waits until
// it is aborted; one that awaits less takes the beginning. False: aborted, or the device or a peer is gone.
bool exchange(Comm &comm, Kind kind, std::vector<Part> sends, std::vector<Part> receives);

// ---- numbers
size_t bytes_of(int type);
// Reduce `count` numbers of each of `ranks`, which lie one after another.
void reduce(char *to, const char *from, size_t count, int ranks, int type, int operation, double scale);
double scalar(const void *value, int type);

// ---- the log
enum class Level { VERSION, WARN, INFO };
// `subsystems` as NCCL_DEBUG_SUBSYS names them, INFO only.
void log(const Comm &comm, Level level, const std::string &text, const char *subsystems = "INIT");
const char *last_error();

}  // namespace played::nccl
