// SPDX-License-Identifier: Apache-2.0
#include "description.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <sys/stat.h>

namespace played {

constexpr char DEFAULT_PATH[] = "/run/played-gpus/machine";
constexpr long LOOK_AGAIN_NS = 2'000'000;  // a look is a stat(2); faults strike within milliseconds

const char *machine_path() {
    const char *named = getenv("PLAYED_GPUS_FILE");
    return named && *named ? named : DEFAULT_PATH;
}

namespace {

long monotonic_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

void set(Device &device, const std::string &key, const char *value) {
    if (key == "name") device.name = value;
    else if (key == "uuid") device.uuid = value;
    else if (key == "pci_address") device.pci_address = value;
    else if (key == "memory_bytes") device.memory_bytes = strtoull(value, nullptr, 10);
    else if (key == "processors") device.processors = atoi(value);
    else if (key == "capability") sscanf(value, "%d.%d", &device.major, &device.minor);
    else if (key == "tflops") device.tflops = atof(value);
    else if (key == "memory_gb_per_s") device.memory_gb_per_s = atof(value);
    else if (key == "link_gb_per_s") device.link_gb_per_s = atof(value);
    else if (key == "jitter") device.jitter = atof(value);
}

void read_line(Machine &into, const char *line) {
    int index, value_at;
    char key[64], text[256];
    double value = 0, after = 0;
    if (sscanf(line, "device %d %63s %n", &index, key, &value_at) == 2) {
        if (index < 0 || index >= MOST_DEVICES) return;
        if (index >= (int)into.devices.size()) into.devices.resize(index + 1);
        set(into.devices[index], key, line + value_at);
    } else if (sscanf(line, "fault %d %63s %lf after %lf", &index, key, &value, &after) >= 2) {
        into.faults.push_back({index, key, value, after});
    } else if (sscanf(line, "address %255s", text) == 1) {
        into.address = text;
    } else if (!sscanf(line, "nccl_version %d", &into.nccl_version)) {
        sscanf(line, "driver_version %d", &into.driver_version);
    }
}

std::shared_ptr<const Machine> read(FILE *file) {
    auto found = std::make_shared<Machine>();
    char line[1024];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        read_line(*found, line);
    }
    return found;
}

// A descriptor that was replaced by rename has another inode, one that was written another time.
bool is_same(const struct stat &a, const struct stat &b) {
    return a.st_ino == b.st_ino && a.st_dev == b.st_dev && a.st_size == b.st_size &&
           a.st_mtim.tv_sec == b.st_mtim.tv_sec && a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
}

}  // namespace

std::shared_ptr<const Machine> machine() {
    static std::mutex &mutex = *new std::mutex;
    static auto &current = *new std::shared_ptr<const Machine>(new Machine);
    static struct stat seen{};
    static long looked_ns = -LOOK_AGAIN_NS;

    std::lock_guard<std::mutex> lock(mutex);
    if (monotonic_ns() - looked_ns < LOOK_AGAIN_NS) return current;
    looked_ns = monotonic_ns();
    struct stat now;
    if (stat(machine_path(), &now) || is_same(now, seen)) return current;
    if (FILE *file = fopen(machine_path(), "re")) {
        fstat(fileno(file), &seen);
        current = read(file);
        fclose(file);
    }
    return current;
}

std::optional<Fault> fault(int device, const char *kind) {
    auto now = machine();
    for (auto &each : now->faults)
        if (each.device == device && each.kind == kind) return each;
    return std::nullopt;
}

bool is_verbose() {
    static bool verbose = getenv("PLAYED_GPUS_VERBOSE") != nullptr;
    return verbose;
}

}  // namespace played
