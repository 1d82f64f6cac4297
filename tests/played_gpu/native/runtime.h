// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "device.h"
#include "memory.h"
#include "stream.h"
#include "usage.h"

// build.py finds what is played by this word.
#define API __attribute__((visibility("default")))

// Remember an error for cudaGetLastError, and return it.
int fail(int error);
