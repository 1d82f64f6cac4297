// SPDX-License-Identifier: Apache-2.0
// The devices that this process sees, what state they are in, and how long work takes on them.
#pragma once
#include "description.h"

namespace played {

// CUDA's runtime and driver number these alike.
enum Error {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INSUFFICIENT_DRIVER = 35,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    LAUNCH_FAILURE = 719,
    ASSERTION = 710,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};
struct ErrorText {
    int code;
    const char *runtime_name, *driver_name, *text;
};
const ErrorText &text_of(int error);

// What CUDA_VISIBLE_DEVICES leaves of the node's devices, by their numbers on the node. Everything
// below and in the other headers counts visible devices from 0, except for faults.
const std::vector<int> &visible();
int on_node(int device);
Device described(int device);
void uuid_bytes(int device, char bytes[16]);
std::optional<Fault> fault_of(int device, const char *kind);

extern thread_local int current_device;

// Open the device at its first use, and say what is wrong with it: every call that a real device
// would have to answer begins with this. Errors stay until the process ends, as a context's do.
int state(int device);
bool is_lost(int device);
void lose(int device, int error);

// Count an operation that is about to run on the device, and what it does to it.
enum class Struck { NOT, HANGS, FALLS };
Struck begin_operation(int device);
bool is_hanging(int device);  // until the fault is taken away
bool is_product_wrong(int device);
bool is_memory_wrong(int device);
bool is_message_wrong(int device);  // one that it receives from another device
bool is_slowed(int device);

// How long an operation has to take that took the CPU so long (a device of the modelled speed: 0 if
// it is as fast as the CPU), and note that the device was busy.
double device_seconds(int device, double cpu_seconds, double modelled_seconds);
// Note that a kernel only waits on the device, as it has to be noted again and again.
void spin(int device);
double product_seconds(int device, double flop);
double copy_seconds(int device, double bytes);
double host_copy_seconds(int device, double bytes);
double link_seconds(int device, double bytes);  // to or from other devices

double monotonic_s();
void sleep_s(double seconds);

}  // namespace played
