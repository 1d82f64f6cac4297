// SPDX-License-Identifier: Apache-2.0
#include "usage.h"

#include "description.h"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace played {
namespace {

constexpr char DIRECTORY[] = "/dev/shm";

std::string prefix(int device) { return "played-gpu-" + machine()->devices.at(device).uuid + "-"; }

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

Usage *map_new(const std::string &path) {
    int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0 || ftruncate(fd, sizeof(Usage))) {
        if (fd >= 0) close(fd);
        return nullptr;
    }
    void *mapped = mmap(nullptr, sizeof(Usage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return mapped == MAP_FAILED ? nullptr : static_cast<Usage *>(mapped);
}

void each_other(int device, const std::function<void(const std::string &, pid_t, const Usage &)> &f) {
    const std::string start = prefix(device);
    DIR *directory = opendir(DIRECTORY);
    if (!directory) return;
    while (dirent *entry = readdir(directory)) {
        const std::string name = entry->d_name;
        if (name.compare(0, start.size(), start)) continue;
        const pid_t pid = atoi(name.c_str() + start.size());
        const std::string path = std::string(DIRECTORY) + "/" + name;
        int fd = pid == getpid() ? -1 : open(path.c_str(), O_RDONLY | O_CLOEXEC);
        Usage found;
        if (fd >= 0 && read(fd, &found, sizeof found) == sizeof found) f(path, pid, found);
        if (fd >= 0) close(fd);
    }
    closedir(directory);
}

bool is_alive(pid_t pid) { return !kill(pid, 0) || errno == EPERM; }

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
    each_other(device, [&](const std::string &, pid_t pid, const Usage &found) {
        if (is_alive(pid)) sum += found.allocated_bytes;
    });
    return sum;
}

bool has_fallen_before(int device) {
    bool fallen = false;
    each_other(device, [&](const std::string &, pid_t, const Usage &found) { fallen |= !!found.has_fallen; });
    return fallen;
}

void remove_leftovers(int device, bool keep_fallen) {
    each_other(device, [&](const std::string &path, pid_t pid, const Usage &found) {
        if (!is_alive(pid) && !(found.has_fallen && keep_fallen)) unlink(path.c_str());
    });
}

}  // namespace played
