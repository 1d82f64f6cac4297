// SPDX-License-Identifier: Apache-2.0
#include "usage.h"

#include "description.h"

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <optional>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace played {
namespace {

constexpr char DIRECTORY[] = "/dev/shm";
constexpr char PREFIX[] = "played-gpu-";

std::string prefix(int device) { return PREFIX + machine()->devices.at(device).uuid + "-"; }

std::string path_of(int device, pid_t pid) {
    return std::string(DIRECTORY) + "/" + prefix(device) + std::to_string(pid);
}

struct Own {
    Usage *mapped = nullptr;
    std::string path;
};
Own own[MOST_DEVICES];
pid_t owner = 0;  // a child that was forked must not unlink its parent's

void unlink_own() {
    if (getpid() != owner) return;
    for (auto &each : own)
        if (each.mapped && !each.mapped->has_fallen) unlink(each.path.c_str());
}

// It appears in its place when it is whole and locked: whoever finds it unlocked finds a dead process's.
bool put_in_place(int fd, const std::string &path) {
    const char *described_by = machine_path();
    if (ftruncate(fd, sizeof(Usage)) || flock(fd, LOCK_EX | LOCK_NB)) return false;
    if (pwrite(fd, described_by, strlen(described_by), sizeof(Usage)) < 0) return false;
    unlink(path.c_str());  // of a process that had the same number
    return !linkat(AT_FDCWD, ("/proc/self/fd/" + std::to_string(fd)).c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW);
}

Usage *map_new(const std::string &path) {
    const int fd = open(DIRECTORY, O_TMPFILE | O_RDWR | O_CLOEXEC, 0644);
    void *mapped = fd >= 0 && put_in_place(fd, path)
                       ? mmap(nullptr, sizeof(Usage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (mapped != MAP_FAILED) return static_cast<Usage *>(mapped);  // the descriptor stays open: it is the lock
    if (fd >= 0) close(fd);
    return nullptr;
}

struct Found {
    std::string path;
    bool is_alive;
    Usage usage;
    std::string described_by;
};

// A number may have passed to another process, and a child may hold the lock longer than its parent lives.
bool is_alive(int fd, const std::string &name) {
    const pid_t pid = atoi(name.c_str() + name.rfind('-') + 1);
    return flock(fd, LOCK_SH | LOCK_NB) && (!kill(pid, 0) || errno == EPERM);
}

std::optional<Found> read_file(const std::string &name) {
    Found found{std::string(DIRECTORY) + "/" + name, false, {}, {}};
    const int fd = open(found.path.c_str(), O_RDONLY | O_CLOEXEC);
    char rest[PATH_MAX];
    const bool is_whole = fd >= 0 && read(fd, &found.usage, sizeof(Usage)) == sizeof(Usage);
    if (const ssize_t length = is_whole ? read(fd, rest, sizeof rest) : 0; length > 0) found.described_by.assign(rest, (size_t)length);
    if (fd >= 0) found.is_alive = is_alive(fd, name);
    if (fd >= 0) close(fd);
    return is_whole ? std::optional(found) : std::nullopt;
}

// Of all other processes that have opened a device whose file's name begins so.
void each_other(const std::string &start, const std::function<void(const Found &)> &f) {
    const std::string mine = "-" + std::to_string(getpid());
    DIR *directory = opendir(DIRECTORY);
    if (!directory) return;
    while (dirent *entry = readdir(directory)) {
        const std::string name = entry->d_name;
        if (name.compare(0, start.size(), start) || name.substr(name.rfind('-')) == mine) continue;
        if (auto found = read_file(name)) f(*found);
    }
    closedir(directory);
}

}  // namespace

Usage &usage(int device) {
    static std::mutex &mutex = *new std::mutex;
    static Usage unshared[MOST_DEVICES];  // where there is no /dev/shm
    std::lock_guard<std::mutex> lock(mutex);
    Own &mine = own[device];
    if (!mine.mapped) {
        if (!owner) {
            owner = getpid();
            atexit(unlink_own);
        }
        mine.path = path_of(device, getpid());
        mine.mapped = map_new(mine.path);
        if (!mine.mapped) mine.mapped = &unshared[device];
    }
    return *mine.mapped;
}

size_t allocated_by_others(int device) {
    size_t sum = 0;
    each_other(prefix(device), [&](const Found &found) {
        if (found.is_alive) sum += found.usage.allocated_bytes;
    });
    return sum;
}

bool has_fallen_before(int device) {
    bool fallen = false;
    each_other(prefix(device), [&](const Found &found) { fallen |= !!found.usage.has_fallen; });
    return fallen;
}

void remove_leftovers(int device, bool keep_fallen) {
    const std::string own = std::string(DIRECTORY) + "/" + prefix(device);
    each_other(PREFIX, [&](const Found &found) {
        const bool is_of_device = !found.path.compare(0, own.size(), own);
        const bool is_kept = is_of_device ? keep_fallen : !access(found.described_by.c_str(), F_OK);
        if (!found.is_alive && !(found.usage.has_fallen && is_kept)) unlink(found.path.c_str());
    });
}

}  // namespace played
