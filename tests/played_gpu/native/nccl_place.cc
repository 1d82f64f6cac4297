// SPDX-License-Identifier: Apache-2.0
// What NCCL needs of its node before ranks meet, in the order and the words of NCCL's source: an
// interface to meet by, a network, and shared memory where ranks of a node use it.
#include "nccl.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sstream>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

namespace played::nccl {

namespace {

constexpr long SEGMENT_BYTES = 9637888;  // of two ranks, with NCCL's own sizes of buffers
constexpr int NAMES_NO_NETWORK_SINCE = 22703;

// `eth,ib0`: by what a name begins with; `=eth0`: by the whole; `^docker`: all but those.
bool fits(const std::string &name, std::string wanted) {
    const bool is_not = !wanted.empty() && wanted[0] == '^';
    if (is_not) wanted.erase(0, 1);
    const bool is_whole = !wanted.empty() && wanted[0] == '=';
    if (is_whole) wanted.erase(0, 1);
    std::istringstream names(wanted);
    for (std::string each; std::getline(names, each, ',');)
        if (is_whole ? name == each : !name.compare(0, each.size(), each)) return !is_not;
    return is_not;
}

bool has_interface(const char *wanted) {
    ifaddrs *all = nullptr;
    if (getifaddrs(&all)) return false;
    bool found = false;
    for (const ifaddrs *each = all; each; each = each->ifa_next)
        found |= each->ifa_addr && each->ifa_addr->sa_family == AF_INET && (each->ifa_flags & IFF_RUNNING) &&
                 fits(each->ifa_name, wanted);
    freeifaddrs(all);
    return found;
}

}  // namespace

int find_interface(const Comm &comm) {
    const char *wanted = getenv("NCCL_SOCKET_IFNAME");
    if (!wanted || strlen(wanted) < 2) return SUCCESS;
    log(comm, Level::INFO, std::string("NCCL_SOCKET_IFNAME set by environment to ") + wanted, "ENV");
    if (has_interface(wanted)) return SUCCESS;
    log(comm, Level::WARN, "Bootstrap : no socket interface found");
    return INVALID_USAGE;
}

int find_network(const Comm &comm) {
    const char *wanted = getenv("NCCL_NET");
    if (!wanted || !*wanted || !strcasecmp(wanted, "Socket") || !strcasecmp(wanted, "IB")) return SUCCESS;
    log(comm, Level::WARN, comm.version() < NAMES_NO_NETWORK_SINCE ? std::string("Error: network ") + wanted + " not found."
                                                                   : "Failed to initialize any NET plugin");
    return INVALID_USAGE;
}

int share_memory(const Comm &comm) {
    char path[] = "/dev/shm/nccl-XXXXXX";
    const int fd = mkstemp(path);
    const bool is_shared = fd >= 0 && !fallocate(fd, 0, 0, SEGMENT_BYTES);
    const std::string why = std::string(strerror(errno)) + " (" + std::to_string(errno) + ")", size = std::to_string(SEGMENT_BYTES);
    if (fd >= 0) {
        close(fd);
        unlink(path);
    }
    if (is_shared) return SUCCESS;
    if (fd >= 0) log(comm, Level::WARN, std::string("Error: failed to extend ") + path + " to " + size + " bytes, error: " + why);
    else log(comm, Level::WARN, std::string("Error: failed to create shared memory file ") + path + ", error " + why);
    log(comm, Level::WARN, std::string("Error while creating shared memory segment ") + path + " (size " + size + "), error: " + why);
    return SYSTEM_ERROR;
}

}  // namespace played::nccl
