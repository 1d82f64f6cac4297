// SPDX-License-Identifier: Apache-2.0
// Communicators: how ranks find each other, split, and part.
#include "nccl.h"

#include <algorithm>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <unistd.h>

using namespace played;
using namespace played::nccl;

namespace {

constexpr uint32_t MAGIC = 0x504c4159;  // "PLAY"
constexpr double LOOK_AGAIN_S = 0.02;
constexpr double NEVER_CONNECTS_S = 120;  // then NCCL's bootstrap gives up

struct Place {
    char address[64];
    uint16_t port;
};
struct Root {  // what a unique ID holds
    uint32_t magic;
    Place place;
};
struct Hello {
    int rank, size, version;
    Place place;
    char host[64];
};
struct Introduction {
    int rank, is_control;
};

std::mutex &mutex = *new std::mutex;
auto &alive = *new std::map<Comm *, std::shared_ptr<Comm>>;

Comm *made(int rank, int size, int device) {
    auto comm = std::make_shared<Comm>();
    comm->rank = rank;
    comm->size = size;
    comm->device = device;
    std::lock_guard<std::mutex> lock(mutex);
    alive[comm.get()] = comm;
    return comm.get();
}

void set_address(Place &place) { snprintf(place.address, sizeof place.address, "%s", own_address().c_str()); }

// The root tells every rank where the others are, once all have come. One that comes twice is new.
void introduce(int listener) {
    std::map<int, std::pair<int, Hello>> here;
    for (int size = INT_MAX; (int)here.size() < size;) {
        const int fd = accept_from(listener, nullptr);
        Hello hello;
        if (fd < 0 || !receive_all(fd, &hello, sizeof hello, nullptr)) {
            close(fd);
            continue;
        }
        size = hello.size;
        if (here.count(hello.rank)) close(here[hello.rank].first);
        here[hello.rank] = {fd, hello};
    }
    std::vector<Hello> table;
    for (auto &[rank, each] : here) table.push_back(each.second);
    for (auto &[rank, each] : here) {
        send_all(each.first, table.data(), table.size() * sizeof(Hello), nullptr);
        close(each.first);
    }
    close(listener);
}

bool versions_agree(const Comm &comm, const std::vector<Hello> &table) {
    for (auto &other : table)
        if (other.version != table[(size_t)comm.rank].version) {
            log(comm, Level::WARN, "Mismatched NCCL version detected : rank " + std::to_string(comm.rank) + " version " +
                std::to_string(table[(size_t)comm.rank].version) + " rank " + std::to_string(other.rank) + " version " + std::to_string(other.version));
            return false;
        }
    return true;
}

// Shared memory is used, and said to be, where NCCL_P2P_DISABLE leaves nothing else.
int choose_ways(const Comm &comm, const std::vector<Hello> &table) {
    for (auto &other : table) {
        if (other.rank == comm.rank) continue;
        const std::string pair = "Channel 00/0 : " + std::to_string(comm.rank) + "[" + std::to_string(comm.device) + "] -> " +
                                 std::to_string(other.rank) + "[0] ";
        const Hello &own = table[(size_t)comm.rank];
        const bool is_near = !strcmp(own.host, other.host) && !strcmp(own.place.address, other.place.address);
        const bool shares = is_near && getenv("NCCL_P2P_DISABLE") && !getenv("NCCL_SHM_DISABLE");
        if (!is_near || (getenv("NCCL_P2P_DISABLE") && !shares)) log(comm, Level::INFO, pair + "[send] via NET/Socket/0", "INIT,NET");
        else if (!shares) log(comm, Level::INFO, pair + "via P2P/CUMEM", "INIT,P2P");
        else if (int error = share_memory(comm)) return error;
        else log(comm, Level::INFO, pair + "via SHM/direct/direct", "INIT,SHM");
    }
    return SUCCESS;
}

// Connect to the ranks before this one, then be connected to by those after it.
bool connect_all(Comm &comm, int listener, const std::vector<Hello> &table) {
    comm.data.assign((size_t)comm.size, -1);
    comm.control.assign((size_t)comm.size, -1);
    for (int peer = 0; peer < comm.rank; peer++)
        for (int is_control : {0, 1}) {
            const int fd = connect_to(table[(size_t)peer].place.address, table[(size_t)peer].place.port);
            const Introduction own{comm.rank, is_control};
            if (fd < 0 || !send_all(fd, &own, sizeof own, &comm.aborted)) return false;
            (is_control ? comm.control : comm.data)[(size_t)peer] = fd;
        }
    for (int left = 2 * (comm.size - 1 - comm.rank); left; left--) {
        const int fd = accept_from(listener, &comm.aborted);
        Introduction other;
        if (fd < 0 || !receive_all(fd, &other, sizeof other, &comm.aborted)) return false;
        (other.is_control ? comm.control : comm.data)[(size_t)other.rank] = fd;
    }
    return true;
}

int joined(Comm &comm, const UniqueId &id) {
    Root root;
    memcpy(&root, &id, sizeof root);
    if (root.magic != MAGIC) return INVALID_ARGUMENT;
    Hello own{comm.rank, comm.size, comm.version(), {}, {}};
    set_address(own.place);
    gethostname(own.host, sizeof own.host - 1);
    const int listener = listen_on(own_address(), &own.place.port);
    const int to_root = connect_to(root.place.address, root.place.port);
    if (listener < 0 || to_root < 0) {
        log(comm, Level::WARN, std::string("socketPollConnect: connect to ") + root.place.address + " returned Connection refused, exceeded error retry count");
        close(listener);
        return SYSTEM_ERROR;
    }
    std::vector<Hello> table((size_t)comm.size);
    const bool introduced = send_all(to_root, &own, sizeof own, &comm.aborted) &&
                            receive_all(to_root, table.data(), table.size() * sizeof own, &comm.aborted);
    close(to_root);
    int result = !introduced ? REMOTE_ERROR : !versions_agree(comm, table) ? INVALID_USAGE : SUCCESS;
    if (!result && !connect_all(comm, listener, table)) result = REMOTE_ERROR;
    close(listener);
    if (!result) result = choose_ways(comm, table);
    return comm.aborted ? (int)INTERNAL_ERROR : result;
}

// What strikes before the ranks find each other.
int struck(Comm &comm) {
    if (auto signal = fault_of(comm.device, "strike_init")) raise((int)signal->value);
    while (fault_of(comm.device, "nccl_init_hang") && !comm.aborted) sleep_s(LOOK_AGAIN_S);
    const double end_s = monotonic_s() + NEVER_CONNECTS_S;
    while (fault_of(comm.device, "link_never") && !comm.aborted) {
        if (monotonic_s() > end_s) {
            log(comm, Level::WARN, "socketPollConnect: connect returned Connection timed out, exceeded error retry count");
            return SYSTEM_ERROR;
        }
        sleep_s(LOOK_AGAIN_S);
    }
    return comm.aborted ? INTERNAL_ERROR : SUCCESS;
}

int initialised(Comm &comm, const UniqueId &id) {
    if (int error = find_interface(comm)) return error;
    if (int error = find_network(comm)) return error;
    if (int error = struck(comm)) return error;
    return joined(comm, id);
}

int begin(Comm *comm, const UniqueId &id, const Config *config) {
    const int version = comm->version();
    if (!comm->rank) log(*comm, Level::VERSION, "NCCL version " + std::to_string(version / 10000) + "." +
        std::to_string(version / 100 % 100) + "." + std::to_string(version % 100) + "+cuda" +
        std::to_string(machine()->driver_version / 1000) + "." + std::to_string(machine()->driver_version % 1000 / 10));
    log(*comm, Level::INFO, "ncclCommInitRankConfig comm 0x1 rank " + std::to_string(comm->rank) + " nranks " +
        std::to_string(comm->size) + " cudaDev " + std::to_string(comm->device) + " busId " + described(comm->device).pci_address + " - Init START");
    if (config && config->blocking == 0) {
        comm->error = IN_PROGRESS;
        comm->pending++;
        std::thread([comm = comm->shared_from_this(), id] {
            current_device = comm->device;
            comm->error = initialised(*comm, id);
            comm->pending--;
        }).detach();
        return IN_PROGRESS;
    }
    WithoutPython others_run;
    return initialised(*comm, id);
}

void wait_until_done(Comm *comm) {
    WithoutPython others_run;
    while (comm->pending && !comm->must_end()) sleep_s(0.001);
}

}  // namespace

namespace played::nccl {

Comm::~Comm() { close_all(); }

void Comm::close_all() {
    for (auto *fds : {&data, &control}) {
        for (int fd : *fds)
            if (fd >= 0) close(fd);
        fds->clear();
    }
}

void Comm::wait_for_abort() const {
    for (; !must_end(); sleep_s(LOOK_AGAIN_S)) spin(device);
}

int Comm::version() const {
    if (auto other = fault_of(device, "nccl_version")) return (int)other->value;
    return machine()->nccl_version;
}

}  // namespace played::nccl

extern "C" {

API int ncclGetUniqueId(UniqueId *id) {
    Comm nobody;
    nobody.device = current_device;
    if (int error = find_interface(nobody)) return error;
    Root root{MAGIC, {}};
    set_address(root.place);
    const int listener = listen_on(own_address(), &root.place.port);
    if (listener < 0) return SYSTEM_ERROR;
    std::thread(introduce, listener).detach();
    memset(id, 0, sizeof *id);
    memcpy(id, &root, sizeof root);
    return SUCCESS;
}
API int ncclCommInitRankConfig(Comm **comm, int size, UniqueId id, int rank, Config *config) {
    if (state(current_device)) return CUDA_ERROR;
    *comm = made(rank, size, current_device);
    return begin(*comm, id, config);
}
API int ncclCommInitRank(Comm **comm, int size, UniqueId id, int rank) { return ncclCommInitRankConfig(comm, size, id, rank, nullptr); }
API int ncclCommInitRankScalable(Comm **comm, int size, int rank, int, UniqueId *ids, Config *config) {
    return ncclCommInitRankConfig(comm, size, ids[0], rank, config);
}

// Everyone tells everyone its colour; the first of each colour is the root of those.
API int ncclCommSplit(Comm *comm, int colour, int key, Comm **split, Config *config) {
    struct Say {
        int colour, key;
        UniqueId id;
    } own{colour, key, {}};
    *split = nullptr;
    if (colour >= 0) ncclGetUniqueId(&own.id);
    std::vector<Say> said((size_t)comm->size);
    said[(size_t)comm->rank] = own;
    for (int peer = 0; peer < comm->size; peer++)
        if (peer != comm->rank && !send_all(comm->control[(size_t)peer], &own, sizeof own, &comm->aborted)) return REMOTE_ERROR;
    for (int peer = 0; peer < comm->size; peer++)
        if (peer != comm->rank && !receive_all(comm->control[(size_t)peer], &said[(size_t)peer], sizeof own, &comm->aborted))
            return REMOTE_ERROR;
    if (colour < 0) return SUCCESS;
    std::vector<std::pair<int, int>> members;  // key, rank
    for (int peer = 0; peer < comm->size; peer++)
        if (said[(size_t)peer].colour == colour) members.push_back({said[(size_t)peer].key, peer});
    std::sort(members.begin(), members.end());
    int rank = 0;
    while (members[(size_t)rank].second != comm->rank) rank++;
    *split = made(rank, (int)members.size(), comm->device);
    return begin(*split, said[(size_t)members[0].second].id, config);
}

API int ncclCommFinalize(Comm *comm) {
    if (comm) wait_until_done(comm);
    return SUCCESS;
}
API int ncclCommDestroy(Comm *comm) {
    if (!comm) return SUCCESS;
    wait_until_done(comm);
    std::lock_guard<std::mutex> lock(mutex);
    if (!comm->aborted) alive.erase(comm);
    return SUCCESS;
}
// PyTorch aborts twice, the second time nothing. What was aborted is kept: its handle may be used.
API int ncclCommAbort(Comm *comm) {
    if (!comm) return SUCCESS;
    comm->aborted = true;
    WithoutPython others_run;
    while (comm->running) sleep_s(0.001);
    std::lock_guard<std::mutex> lock(comm->order);
    comm->close_all();
    return SUCCESS;
}
API int ncclCommGetAsyncError(Comm *comm, int *error) {
    if (!comm) return INVALID_ARGUMENT;
    *error = comm->error;
    return SUCCESS;
}
API int ncclCommCount(Comm *comm, int *size) {
    *size = comm->size;
    return SUCCESS;
}
API int ncclCommUserRank(Comm *comm, int *rank) {
    *rank = comm->rank;
    return SUCCESS;
}
API int ncclCommCuDevice(Comm *comm, int *device) {
    *device = comm->device;
    return SUCCESS;
}
API int ncclCommRegister(Comm *, void *, size_t, void **handle) {
    *handle = (void *)1;
    return SUCCESS;
}
API int ncclCommDeregister(Comm *, void *) { return SUCCESS; }
API int ncclGetVersion(int *version) {
    *version = machine()->nccl_version;
    for (int i = 0; i < (int)visible().size(); i++)
        if (auto other = fault_of(i, "nccl_version"); other && i == current_device) *version = (int)other->value;
    return SUCCESS;
}
API const char *ncclGetErrorString(int result) {
    static const char *texts[] = {
        "no error",
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error - please report this issue to the NCCL developers",
        "invalid argument (run with NCCL_DEBUG=WARN for details)",
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}
API const char *ncclGetLastError(Comm *) { return last_error(); }
}
