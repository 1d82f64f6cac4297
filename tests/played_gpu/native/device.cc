// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include "usage.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <random>

namespace played {

thread_local int current_device = 0;

namespace {

// Between operations a busy machine lets its threads wait: nothing cools down in so short a time.
constexpr double PAUSE_S = 0.5;
const std::string INSTANCE = " MIG 1g.10gb";  // the first part of a divided device is all that a process sees
// What a context takes of a real device, or less of a small one.
constexpr size_t MOST_CONTEXT_BYTES = 512ul << 20;
constexpr size_t CONTEXT_SHARE = 16;
constexpr double SPIN_S = 0.1;

struct State {
    std::mutex opening;
    std::atomic<bool> opened{false};
    std::atomic<int> error{OK};
    std::atomic<long> operations{0}, products{0}, arrays{0}, messages{0};
    std::mutex heating;
    double heat_s = 0, works_until_s = 0;
    bool hot = false;
};
State *states = new State[MOST_DEVICES];

int number_or_uuid(const std::string &word, const std::vector<Device> &devices) {
    if (word.compare(0, 4, "GPU-")) {
        char *end;
        const long number = strtol(word.c_str(), &end, 10);
        return word.empty() || *end || number < 0 || number >= (long)devices.size() ? -1 : (int)number;
    }
    for (size_t i = 0; i < devices.size(); i++)  // the beginning of a UUID is enough
        if (!devices[i].uuid.compare(0, word.size(), word)) return (int)i;
    return -1;
}

// What is not a device hides all that follow it, as CUDA does.
std::vector<int> *find_visible() {
    auto *found = new std::vector<int>;
    auto now = machine();
    const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
    if (!chosen) {
        for (size_t i = 0; i < now->devices.size(); i++) found->push_back((int)i);
        return found;
    }
    for (std::string rest = chosen; !rest.empty();) {
        const size_t comma = rest.find(',');
        const int index = number_or_uuid(rest.substr(0, comma), now->devices);
        if (index < 0 || std::count(found->begin(), found->end(), index)) break;
        found->push_back(index);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    }
    return found;
}

// Opens once; a device that does not open is asked again by the next call, as a mended one would.
int opened(int device, State &state) {
    if (state.opened) return OK;
    std::lock_guard<std::mutex> lock(state.opening);
    if (state.opened) return OK;
    if (auto slow = fault_of(device, "open_slowly")) sleep_s(slow->value);
    if (auto refused = fault_of(device, "open_error")) return (int)refused->value;
    const bool off_bus = fault_of(device, "off_bus").has_value();
    if (off_bus && has_fallen_before(on_node(device))) return UNKNOWN;
    remove_leftovers(on_node(device), off_bus);
    usage(on_node(device)).allocated_bytes =
        std::min(MOST_CONTEXT_BYTES, described(device).memory_bytes / CONTEXT_SHARE);
    state.opened = true;
    return OK;
}

double normal() {
    static thread_local std::mt19937 generator(std::random_device{}());
    return std::normal_distribution<double>()(generator);
}

// It heats up while it works, slowed down or not, and cools down in pauses; hot until half of that is gone.
bool is_hot(int device, double begun_s) {
    auto throttle = fault_of(device, "throttle");
    State &state = states[device];
    std::lock_guard<std::mutex> lock(state.heating);
    const double pause_s = begun_s - state.works_until_s;
    if (pause_s > PAUSE_S) state.heat_s = std::max(0.0, state.heat_s - pause_s);
    if (!throttle) return state.hot = false;
    state.heat_s = std::min(state.heat_s, 2 * throttle->after);
    state.hot = state.heat_s >= (state.hot ? throttle->after / 2 : throttle->after);
    return state.hot;
}

void heat_up(int device, double begun_s, double work_s) {
    State &state = states[device];
    std::lock_guard<std::mutex> lock(state.heating);
    state.heat_s += work_s;
    state.works_until_s = std::max(state.works_until_s, begun_s + work_s);
}

}  // namespace

const std::vector<int> &visible() {
    static const std::vector<int> *found = find_visible();
    return *found;
}

int on_node(int device) { return visible().at(device); }

Device described(int device) {
    auto now = machine();
    const int index = on_node(device);
    if (index >= (int)now->devices.size()) return Device{};
    Device found = now->devices[index];
    if (auto divided = fault(index, "mig_mode"); divided && divided->value == 1) found.name += INSTANCE;
    return found;
}

void uuid_bytes(int device, char bytes[16]) {
    std::string digits;
    for (char c : described(device).uuid.substr(3))  // after "GPU"
        if (c != '-') digits += c;
    for (size_t i = 0; i < 16; i++)
        bytes[i] = (char)strtol(digits.substr(std::min(2 * i, digits.size()), 2).c_str(), nullptr, 16);
}

std::optional<Fault> fault_of(int device, const char *kind) { return fault(on_node(device), kind); }

int state(int device) {
    if (device < 0 || device >= (int)visible().size()) return visible().empty() ? NO_DEVICE : INVALID_DEVICE;
    State &state = states[device];
    if (state.error) return state.error;
    return opened(device, state);
}

bool is_lost(int device) { return states[device].error != OK; }

void lose(int device, int error) {
    int well = OK;
    states[device].error.compare_exchange_strong(well, error);
}

Struck begin_operation(int device) {
    const long number = ++states[device].operations;
    if (auto sticky = fault_of(device, "sticky_error"); sticky && number > sticky->after)
        lose(device, (int)sticky->value);
    if (auto off_bus = fault_of(device, "off_bus"); off_bus && number > off_bus->after) {
        usage(on_node(device)).has_fallen = 1;
        return Struck::FALLS;
    }
    return is_hanging(device) ? Struck::HANGS : Struck::NOT;
}

bool is_hanging(int device) {
    auto hang = fault_of(device, "hang");
    return hang && states[device].operations > hang->after;
}

bool is_slowed(int device) { return fault_of(device, "slow") || fault_of(device, "throttle"); }

bool is_product_wrong(int device) {
    auto wrong = fault_of(device, "wrong_bit");
    if (!wrong) return false;
    return ++states[device].products % std::max(1L, (long)wrong->value) == 0;
}

bool is_memory_wrong(int device) {
    auto wrong = fault_of(device, "wrong_memory");
    if (!wrong) return false;
    return ++states[device].arrays % std::max(1L, (long)wrong->value) == 0;
}

bool is_message_wrong(int device) {
    auto wrong = fault_of(device, "link_flip");
    if (!wrong) return false;
    return ++states[device].messages % std::max(1L, (long)wrong->value) == 0;
}

double device_seconds(int device, double cpu_seconds, double modelled_seconds) {
    double seconds = modelled_seconds > 0 ? modelled_seconds : cpu_seconds;
    if (auto slow = fault_of(device, "slow"); slow && slow->value > 0) seconds /= slow->value;
    const double begun_s = monotonic_s() - cpu_seconds;
    const bool hot = is_hot(device, begun_s);
    if (hot) seconds /= std::max(0.01, fault_of(device, "throttle").value_or(Fault{0, "", 1, 0}).value);
    if (const double jitter = described(device).jitter; jitter > 0 && modelled_seconds > 0)
        seconds *= std::max(0.5, 1 + jitter * normal());
    heat_up(device, begun_s, seconds);
    Usage &mine = usage(on_node(device));
    mine.is_throttled = hot;
    mine.worked_ns += (uint64_t)(seconds * 1e9);
    const auto now_ns = (uint64_t)(monotonic_s() * 1e9), left_ns = (uint64_t)(std::max(0.0, seconds - cpu_seconds) * 1e9);
    mine.busy_until_ns = std::max<uint64_t>(mine.busy_until_ns, now_ns + left_ns);
    return seconds;
}

void spin(int device) { usage(on_node(device)).spins_until_ns = (uint64_t)((monotonic_s() + SPIN_S) * 1e9); }

double product_seconds(int device, double flop) {
    const double tflops = described(device).tflops;
    return tflops > 0 ? flop / tflops / 1e12 : 0;
}

double copy_seconds(int device, double bytes) {
    double speed = described(device).memory_gb_per_s;
    if (auto slow = fault_of(device, "slow_memory"); slow && speed > 0) speed *= slow->value;
    return speed > 0 ? bytes / speed / 1e9 : 0;
}

double host_copy_seconds(int device, double bytes) {
    auto slow = fault_of(device, "slow_host");
    return slow && slow->value > 0 ? bytes / slow->value / 1e9 : 0;
}

double link_seconds(int device, double bytes) {
    double speed = described(device).link_gb_per_s;
    if (auto slow = fault_of(device, "link_slow")) speed = slow->value;
    return speed > 0 ? bytes / speed / 1e9 : 0;
}

double monotonic_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

void sleep_s(double seconds) {
    if (seconds <= 0) return;
    timespec left{(time_t)seconds, (long)(std::fmod(seconds, 1) * 1e9)};
    while (nanosleep(&left, &left)) {}
}

}  // namespace played
