// SPDX-License-Identifier: Apache-2.0
// A played libnvidia-ml.so.1: answers of the driver about the GPUs that README.md describes, broken
// as that file says. It is read for every question, so a fault can strike between two of them.
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;

// Codes of nvml.h.
enum {
    SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15
};
enum { IDLE = 0x1, POWER_CAP = 0x4, SLOWDOWN = 0x8, HARDWARE_THERMAL = 0x40 };
enum { MOST_DEVICES = 64, LINE = 512, NVLINKS = 18, SM_CLOCK = 1, MAX_MHZ = 1980, IDLE_MHZ = 345 };
enum { CUDA_ECC_ERROR = 214 };

static int numbers[MOST_DEVICES];

// ---- the description

// Copy what follows `start` and a space in its line; return 0 where there is no such line.
static int described(const char *start, char *rest) {
    const char *path = getenv("PLAYED_GPUS_FILE");
    FILE *file = fopen(path ? path : "/run/played-gpus/machine", "r");
    size_t length = strlen(start);
    char line[LINE];
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        found = !strncmp(line, start, length) && (line[length] == ' ' || line[length] == '\n');
        if (found) snprintf(rest, LINE, "%s", line[length] == ' ' ? line + length + 1 : "");
    }
    if (file) fclose(file);
    if (found) rest[strcspn(rest, "\n")] = 0;
    return found;
}

static int of_device(int gpu, const char *key, char *rest) {
    char start[LINE];
    snprintf(start, sizeof start, "device %d %s", gpu, key);
    return described(start, rest);
}

static int has_fault(int gpu, const char *kind, double *value, double *after) {
    char start[LINE], rest[LINE];
    double numbers_of_it[2] = {0, 0};
    snprintf(start, sizeof start, "fault %d %s", gpu, kind);
    if (!described(start, rest)) return 0;
    sscanf(rest, "%lf after %lf", &numbers_of_it[0], &numbers_of_it[1]);
    if (value) *value = numbers_of_it[0];
    if (after) *after = numbers_of_it[1];
    return 1;
}

static long long fault_or(int gpu, const char *kind, long long well) {
    double value;
    return has_fault(gpu, kind, &value, NULL) ? (long long)value : well;
}

static long long whole(const char *start, long long otherwise) {
    char rest[LINE];
    return described(start, rest) ? atoll(rest) : otherwise;
}

// ---- what its processes do with it, each in a file that the played CUDA runtime keeps

struct Use { ull bytes, busy_until_ns, work_ns, throttled, fallen, spins_until_ns; };

// A process has its file locked while it lives: its number alone may have passed to another one.
static int used_by(const char *path, uint *pid, struct Use *use, int *lives) {
    *pid = (uint)atol(strrchr(path, '-') + 1);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    memset(use, 0, sizeof *use);
    int found = file >= 0 && read(file, use, sizeof *use) == sizeof *use;
    *lives = found && flock(file, LOCK_SH | LOCK_NB) && (!kill((pid_t)*pid, 0) || errno != ESRCH);
    if (file >= 0) close(file);
    return found;
}

// Sum up all of them; keep the first `most` processes, and return how many there are.
static uint uses_of(int gpu, struct Use *all, uint *pids, ull *bytes, uint most) {
    char pattern[LINE + 32], uuid[LINE] = "";
    uint count = 0;
    glob_t found;
    memset(all, 0, sizeof *all);
    of_device(gpu, "uuid", uuid);
    snprintf(pattern, sizeof pattern, "/dev/shm/played-gpu-%s-*", uuid);
    if (!glob(pattern, 0, NULL, &found)) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            int lives;
            uint pid;
            struct Use use;
            if (!used_by(found.gl_pathv[i], &pid, &use, &lives)) continue;
            all->fallen |= use.fallen;  // and stays so when its process has ended
            if (!lives) continue;
            if (count++ < most) { pids[count - 1] = pid; bytes[count - 1] = use.bytes; }
            all->bytes += use.bytes;
            if (use.busy_until_ns > all->busy_until_ns) all->busy_until_ns = use.busy_until_ns;
            if (use.work_ns > all->work_ns) all->work_ns = use.work_ns;
            all->throttled |= use.throttled;
            if (use.spins_until_ns > all->spins_until_ns) all->spins_until_ns = use.spins_until_ns;
        }
        globfree(&found);
    }
    uint other = (uint)fault_or(gpu, "occupied_by", 0);
    ull held = (ull)fault_or(gpu, "memory_used", 0);
    if (other) {
        if (count < most) { pids[count] = other; bytes[count] = held; }
        count++;
    }
    all->bytes += held;
    return count;
}

static struct Use use_of(int gpu) {
    struct Use all;
    uses_of(gpu, &all, NULL, NULL, 0);
    return all;
}

static int is_since(ull until_ns) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ull now_ns = (ull)now.tv_sec * 1000000000ull + (ull)now.tv_nsec;
    // As a driver that samples: what has just ended still counts.
    return until_ns && until_ns + 200000000ull > now_ns;
}

static int works(const struct Use *use) { return is_since(use->busy_until_ns); }
// A kernel that only waits keeps the GPU at its clock and as used as work does, at little power.
static int is_busy(const struct Use *use) { return works(use) || is_since(use->spins_until_ns); }

// ---- how an answer is given

// The error that a GPU answers every question with, 0 where it is well enough to answer.
static int refused(int gpu) {
    double after;
    int error = (int)fault_or(gpu, "nvml_error", 0);
    if (error) return error;
    if (!has_fault(gpu, "off_bus", NULL, &after)) return SUCCESS;
    return after == 0 || use_of(gpu).fallen ? GPU_IS_LOST : SUCCESS;
}

// The value that a fault sets, or else `well`; -1 stands for "not supported".
#define ANSWER(gpu, kind, well, target) do { \
    int error = refused(*(gpu)); \
    if (error) return error; \
    long long value = fault_or(*(gpu), kind, well); \
    if (value < 0) return NOT_SUPPORTED; \
    *(target) = value; \
    return SUCCESS; } while (0)

static int lost_memory(int gpu) { return fault_or(gpu, "sticky_error", 0) == CUDA_ECC_ERROR; }

// ---- the library

int nvmlInitWithFlags(uint flags) {
    (void)flags;
    while (whole("nvml_start", 0) < 0) usleep(10000);
    return (int)whole("nvml_start", DRIVER_NOT_LOADED);  // no description, no driver
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) {
    switch (code) {
        case SUCCESS: return "Success";
        case NOT_SUPPORTED: return "Not Supported";
        case GPU_IS_LOST: return "GPU is lost";
        case 999: return "Unknown Error";
        default: return "Error";
    }
}
int nvmlSystemGetDriverVersion(char *text, uint size) {
    snprintf(text, size, "580.82.07");
    return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = (int)whole("driver_version", 0);
    return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return nvmlSystemGetCudaDriverVersion(version);
}
int nvmlDeviceGetCount_v2(uint *count) { *count = (uint)whole("count", 0); return SUCCESS; }

// ---- which GPU

int nvmlDeviceGetHandleByIndex_v2(uint index, int **handle) {
    if (index >= (uint)whole("count", 0)) return INVALID_ARGUMENT;
    numbers[index] = (int)index;
    *handle = &numbers[index];
    return (int)fault_or((int)index, "no_handle", 0);
}
static int by(const char *key, const char *wanted, int **handle) {
    char rest[LINE];
    for (int i = 0; i < (int)whole("count", 0); i++)
        if (of_device(i, key, rest) && !strcasecmp(rest, wanted))
            return nvmlDeviceGetHandleByIndex_v2((uint)i, handle);
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, int **handle) { return by("uuid", uuid, handle); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, int **handle) {
    // NVML writes the domain with eight digits, the kernel with four.
    return by("pci_address", strlen(bus) == 16 ? bus + 4 : bus, handle);
}
int nvmlDeviceGetIndex(int *gpu, uint *index) { *index = (uint)*gpu; return refused(*gpu); }
int nvmlDeviceGetMinorNumber(int *gpu, uint *minor) { *minor = (uint)*gpu; return refused(*gpu); }
int nvmlDeviceGetUUID(int *gpu, char *text, uint size) {
    char uuid[LINE] = "";
    of_device(*gpu, "uuid", uuid);
    snprintf(text, size, "%s", uuid);
    return refused(*gpu);
}
int nvmlDeviceGetName(int *gpu, char *text, uint size) {
    char name[LINE] = "";
    of_device(*gpu, "name", name);
    snprintf(text, size, "%s", name);
    return refused(*gpu);
}
int nvmlDeviceGetPciInfo_v3(int *gpu, char *info) {
    char address[LINE] = "";
    uint domain = 0, bus = 0, device = 0;
    of_device(*gpu, "pci_address", address);
    sscanf(address, "%x:%x:%x", &domain, &bus, &device);
    // 16 bytes of an older name, domain, bus, device, two ids, name.
    memset(info, 0, 68);
    memcpy(info + 16, &domain, 4);
    memcpy(info + 20, &bus, 4);
    memcpy(info + 24, &device, 4);
    snprintf(info + 36, 32, "%08X:%02X:%02X.0", domain, bus, device);
    return refused(*gpu);
}

// ---- memory and processes

int nvmlDeviceGetMemoryInfo(int *gpu, ull *info) {
    char rest[LINE] = "0";
    of_device(*gpu, "memory_bytes", rest);
    ull total = strtoull(rest, NULL, 10), used = use_of(*gpu).bytes;
    info[0] = total; info[1] = used < total ? total - used : 0; info[2] = used;
    return refused(*gpu);
}
// Each process is its number, padding and bytes; from version 2 on with two numbers of MIG instances.
static int running(int gpu, uint *count, char *found, size_t size) {
    uint pids[MOST_DEVICES];
    ull bytes[MOST_DEVICES];
    struct Use all;
    int error = refused(gpu);
    if (error) return error;
    uint there = uses_of(gpu, &all, pids, bytes, MOST_DEVICES);
    if (there > MOST_DEVICES) there = MOST_DEVICES;
    uint room = *count;
    *count = there;
    if (there > room) return INSUFFICIENT_SIZE;
    for (uint i = 0; i < there; i++) {
        memset(found + size * i, 0xff, size);
        memcpy(found + size * i, &pids[i], 4);
        memcpy(found + size * i + 8, &bytes[i], 8);
    }
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(int *gpu, uint *count, char *found) {
    return running(*gpu, count, found, 16);
}
int nvmlDeviceGetComputeRunningProcesses_v3(int *gpu, uint *count, char *found) {
    return running(*gpu, count, found, 24);
}
int nvmlDeviceGetRemappedRows(int *gpu, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    int is_lost = lost_memory(*gpu);
    *corrected = 0;
    *uncorrected = (uint)fault_or(*gpu, "remapped_rows", is_lost);
    *failed = (uint)fault_or(*gpu, "remap_failed", 0);
    ANSWER(gpu, "remap_pending", is_lost, pending);
}
int nvmlDeviceGetTotalEccErrors(int *gpu, int type, int counter, ull *count) {
    (void)counter;
    if (type == 0) ANSWER(gpu, "corrected_errors", 0, count);
    ANSWER(gpu, "uncorrected_errors", lost_memory(*gpu), count);
}
int nvmlDeviceGetRetiredPages(int *gpu, int cause, uint *count, ull *pages) {
    int error = refused(*gpu);
    if (error) return error;
    // GPUs that remap rows retire no pages.
    long long retired = fault_or(*gpu, "retired_pages", -1);
    if (retired < 0) return NOT_SUPPORTED;
    if (cause != 0) retired = 0;
    uint room = *count;
    *count = (uint)retired;
    if (room < (uint)retired || !pages) return INSUFFICIENT_SIZE;
    memset(pages, 0, sizeof *pages * (size_t)retired);
    return SUCCESS;
}
int nvmlDeviceGetEccMode(int *gpu, uint *now, uint *pending) { *pending = 1; ANSWER(gpu, "ecc_mode", 1, now); }
int nvmlDeviceGetMigMode(int *gpu, uint *now, uint *pending) { *pending = 0; ANSWER(gpu, "mig_mode", 0, now); }
int nvmlDeviceGetPersistenceMode(int *gpu, uint *on) { ANSWER(gpu, "persistence_mode", 1, on); }

// ---- what follows the load

int nvmlDeviceGetCurrentClocksEventReasons(int *gpu, ull *reasons) {
    struct Use use = use_of(*gpu);
    long long well = use.throttled ? SLOWDOWN | HARDWARE_THERMAL : works(&use) ? POWER_CAP : is_busy(&use) ? 0 : IDLE;
    ANSWER(gpu, "clock_reasons", well, reasons);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(int *gpu, ull *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(gpu, reasons);
}
int nvmlDeviceGetClockInfo(int *gpu, int type, uint *mhz) {
    struct Use use = use_of(*gpu);
    double share = 1;
    if (type != SM_CLOCK) return INVALID_ARGUMENT;
    if (use.throttled) has_fault(*gpu, "throttle", &share, NULL);
    ANSWER(gpu, "clock_mhz", is_busy(&use) ? (long long)(MAX_MHZ * share) : IDLE_MHZ, mhz);
}
int nvmlDeviceGetUtilizationRates(int *gpu, uint *rates) {
    struct Use use = use_of(*gpu);
    // A kernel that only waits reads a flag again and again, which no share of a percent shows.
    rates[1] = (uint)fault_or(*gpu, "memory_utilization", works(&use) ? 40 : 0);
    ANSWER(gpu, "utilization", is_busy(&use) ? 100 : 0, rates);
}
int nvmlDeviceGetTemperature(int *gpu, int sensor, uint *celsius) {
    (void)sensor;
    struct Use use = use_of(*gpu);
    // It warms from 33 C to 68 C, half of the way within three seconds of work.
    double work_s = (double)use.work_ns / 1e9;
    long long warm = 33 + (long long)(35 * work_s / (work_s + 3));
    ANSWER(gpu, "temperature_c", use.throttled ? 90 : works(&use) ? warm : is_busy(&use) ? 45 : 33, celsius);
}
int nvmlDeviceGetPowerUsage(int *gpu, uint *milliwatts) {
    struct Use use = use_of(*gpu);
    int error = refused(*gpu);
    if (error) return error;
    long long watts = fault_or(*gpu, "power_w", works(&use) ? 690 : is_busy(&use) ? 130 : 75);
    if (watts < 0) return NOT_SUPPORTED;
    *milliwatts = (uint)(watts * 1000);
    return SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(int *gpu, uint *milliwatts) {
    ANSWER(gpu, "power_limit_mw", 700000, milliwatts);
}

// ---- links

int nvmlDeviceGetNvLinkState(int *gpu, uint link, uint *active) {
    if (link >= NVLINKS) return INVALID_ARGUMENT;
    *active = (long long)link >= fault_or(*gpu, "nvlinks_down", 0);
    return refused(*gpu);
}
// PyTorch looks for these in any NVML that it finds.
int nvmlDeviceGetNvLinkRemoteDeviceType(int *gpu, uint link, uint *type) {
    (void)gpu; (void)link; (void)type;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(int *gpu, uint link, char *info) {
    (void)gpu; (void)link; (void)info;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetP2PStatus(int *gpu, int *other, int kind, uint *status) {
    (void)other; (void)kind;
    *status = 0;
    return refused(*gpu);
}
int nvmlDeviceGetCurrPcieLinkWidth(int *gpu, uint *width) { ANSWER(gpu, "pcie_width", 16, width); }
int nvmlDeviceGetMaxPcieLinkWidth(int *gpu, uint *width) { ANSWER(gpu, "max_pcie_width", 16, width); }
int nvmlDeviceGetCurrPcieLinkGeneration(int *gpu, uint *generation) {
    ANSWER(gpu, "pcie_generation", 5, generation);
}
int nvmlDeviceGetGpuFabricInfoV(int *gpu, char *info) {
    // version, 16 bytes of cluster, status, clique, state
    uint status = (uint)fault_or(*gpu, "fabric_status", 0);
    uint state = (uint)fault_or(*gpu, "fabric_state", 3);
    uint cluster = (uint)fault_or(*gpu, "fabric_cluster", 0);
    uint clique = (uint)fault_or(*gpu, "fabric_clique", 0);
    memset(info + 4, 0, 16);
    memcpy(info + 4, &cluster, 4);
    memcpy(info + 20, &status, 4);
    memcpy(info + 24, &clique, 4);
    memcpy(info + 28, &state, 4);
    return refused(*gpu);
}
int nvmlDeviceGetFieldValues(int *gpu, int count, char *values) {
    // Each is 40 bytes: field, scope, timestamp, latency, type, return code, value. Only the
    // recovery action is asked for.
    long long action = fault_or(*gpu, "recovery_action", lost_memory(*gpu));
    for (int i = 0; i < count; i++) {
        int code = action < 0 ? NOT_SUPPORTED : SUCCESS;
        ull value = action < 0 ? 0 : (ull)action;
        memcpy(values + 40 * i + 28, &code, 4);
        memcpy(values + 40 * i + 32, &value, 8);
    }
    return refused(*gpu);
}
