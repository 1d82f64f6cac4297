// SPDX-License-Identifier: Apache-2.0
// Plays libnvidia-ml.so.1 for GPUs that a text file describes: lines `key=value`, or
// `N.key=value` for GPU N alone. The file is named by STUB_NVML, else it is /tmp/stub-nvml.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;
static int numbers[64];

static long long ask(const int *gpu, const char *key, long long otherwise) {
    const char *path = getenv("STUB_NVML") ? getenv("STUB_NVML") : "/tmp/stub-nvml";
    char own[64] = "", line[256];
    if (gpu) snprintf(own, sizeof own, "%d.%s=", *gpu, key);
    FILE *file = fopen(path, "r");
    long long found = otherwise;
    int is_own = 0;
    while (file && fgets(line, sizeof line, file)) {
        size_t length = strlen(key);
        if (own[0] && !strncmp(line, own, strlen(own))) {
            found = strtoll(line + strlen(own), NULL, 0);
            is_own = 1;
        } else if (!is_own && !strncmp(line, key, length) && line[length] == '=') {
            found = strtoll(line + length + 1, NULL, 0);
        }
    }
    if (file) fclose(file);
    return found;
}

// -1 stands for "not supported"; a GPU with an error answers every question with it.
#define ANSWER(gpu, key, well, target) do { \
    if (ask(gpu, "error", 0)) return (int)ask(gpu, "error", 0); \
    long long value = ask(gpu, key, well); \
    if (value < 0) return 3; \
    *(target) = value; \
    return 0; } while (0)

int nvmlInitWithFlags(uint flags) { (void)flags; while (ask(NULL, "hang", 0)) sleep(1);
    return (int)ask(NULL, "init", 0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { static char text[32];
    snprintf(text, sizeof text, "error %d", code); return text; }
int nvmlSystemGetDriverVersion(char *text, uint size) { snprintf(text, size, "570.124.06"); return 0; }
int nvmlDeviceGetCount_v2(uint *count) { *count = (uint)ask(NULL, "count", 8); return 0; }
int nvmlDeviceGetHandleByIndex_v2(uint index, int **handle) {
    numbers[index] = (int)index; *handle = &numbers[index]; return (int)ask(*handle, "handle", 0); }
int nvmlDeviceGetUUID(int *gpu, char *text, uint size) {
    snprintf(text, size, "GPU-%d", *gpu); return (int)ask(gpu, "error", 0); }
int nvmlDeviceGetPciInfo_v3(int *gpu, char *info) {
    snprintf(info + 36, 32, "00000000:%02X:00.0", *gpu + 1); return (int)ask(gpu, "error", 0); }
int nvmlDeviceGetComputeRunningProcesses_v3(int *gpu, uint *count, char *found) {
    if (ask(gpu, "error", 0)) return (int)ask(gpu, "error", 0);
    uint pid = (uint)ask(gpu, "process", 0);
    if (!pid) { *count = 0; return 0; }
    if (*count < 1) { *count = 1; return 7; }
    memset(found, 0, 24); memcpy(found, &pid, 4); *count = 1; return 0; }
int nvmlDeviceGetRemappedRows(int *gpu, uint *a, uint *b, uint *pending, uint *failed) {
    *a = (uint)ask(gpu, "remapped", 0); *b = 0; *failed = (uint)ask(gpu, "remap_failed", 0); ANSWER(gpu, "remap_pending", 0, pending); }
int nvmlDeviceGetTotalEccErrors(int *gpu, int type, int counter, ull *count) {
    (void)type; (void)counter; ANSWER(gpu, "uncorrected", 0, count); }
int nvmlDeviceGetCurrentClocksEventReasons(int *gpu, ull *reasons) { ANSWER(gpu, "reasons", 1, reasons); }
int nvmlDeviceGetMigMode(int *gpu, uint *now, uint *pending) { *pending = 0; ANSWER(gpu, "mig", 0, now); }
int nvmlDeviceGetNvLinkState(int *gpu, uint link, uint *active) {
    if (link >= 18) return 2;
    *active = (long long)link >= ask(gpu, "links_down", 0); return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(int *gpu, uint *width) { ANSWER(gpu, "width", 16, width); }
int nvmlDeviceGetMaxPcieLinkWidth(int *gpu, uint *width) { ANSWER(gpu, "max_width", 16, width); }
int nvmlDeviceGetCurrPcieLinkGeneration(int *gpu, uint *generation) { ANSWER(gpu, "generation", 5, generation); }
int nvmlDeviceGetGpuFabricInfoV(int *gpu, char *info) {
    // version, 16 bytes of cluster, status, clique, state
    uint status = (uint)ask(gpu, "fabric_status", 0), state = (uint)ask(gpu, "fabric_state", 3);
    memcpy(info + 20, &status, 4); memcpy(info + 28, &state, 4);
    return ask(gpu, "error", 0) ? (int)ask(gpu, "error", 0) : 0; }
int nvmlDeviceGetFieldValues(int *gpu, int count, char *values) {
    // One value: field, scope, timestamp, latency, type, return code, value.
    (void)count;
    uint action = (uint)ask(gpu, "recovery", 0); int code = (int)ask(gpu, "recovery_return", 0);
    memcpy(values + 28, &code, 4); memcpy(values + 32, &action, 4);
    return (int)ask(gpu, "error", 0); }
int nvmlDeviceGetUtilizationRates(int *gpu, uint *rates) { ANSWER(gpu, "utilization", 0, rates); }
int nvmlDeviceGetClockInfo(int *gpu, int type, uint *mhz) {
    if (type != 1) return 2;  // the clock of the multiprocessors only
    ANSWER(gpu, "clock", 1980, mhz); }
int nvmlDeviceGetTemperature(int *gpu, int sensor, uint *celsius) {
    (void)sensor; ANSWER(gpu, "temperature", 45, celsius); }
int nvmlDeviceGetPowerUsage(int *gpu, uint *milliwatts) { ANSWER(gpu, "milliwatts", 700000, milliwatts); }
int nvmlDeviceGetRetiredPages(int *gpu, int cause, uint *count, ull *pages) {
    if (ask(gpu, "error", 0)) return (int)ask(gpu, "error", 0);
    long long found = cause == 0 ? ask(gpu, "retired", -1) : 0;
    if (found < 0) return 3;
    if (*count < (uint)found || !pages) { *count = (uint)found; return 7; }
    memset(pages, 0, sizeof *pages * (size_t)found); *count = (uint)found; return 0; }
