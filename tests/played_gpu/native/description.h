// SPDX-License-Identifier: Apache-2.0
// What is played: the devices of this node and their faults, from the file that README.md describes.
#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace played {

constexpr int MOST_DEVICES = 64;

struct Device {
    std::string name, uuid, pci_address;
    size_t memory_bytes = 0;
    int processors = 1, major = 9, minor = 0;
    double tflops = 0, memory_gb_per_s = 0, link_gb_per_s = 0, jitter = 0;
};

struct Fault {
    int device;
    std::string kind;
    double value, after;
};

struct Machine {
    std::vector<Device> devices;
    std::vector<Fault> faults;
    std::string address = "127.0.0.1";
    int nccl_version = 0, driver_version = 0;
};

// The file that describes it.
const char *machine_path();

// The file as it is now; it is read again once it has been replaced. No file: no devices.
std::shared_ptr<const Machine> machine();

// The fault of this kind that a device has now. Devices are counted as on the node, not as visible.
std::optional<Fault> fault(int device, const char *kind);

// Whether to name every call that is not played (PLAYED_GPUS_VERBOSE=1).
bool is_verbose();

}  // namespace played
