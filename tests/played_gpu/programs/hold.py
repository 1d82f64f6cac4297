# SPDX-License-Identifier: Apache-2.0
"""Open a device by its driver alone, tell its free memory, and hold it until the input ends."""

import ctypes
import sys

driver = ctypes.CDLL("libcuda.so.1")
device, context, free, total = (
    ctypes.c_int(),
    ctypes.c_void_p(),
    ctypes.c_size_t(),
    ctypes.c_size_t(),
)
for failed in (
    driver.cuInit(0),
    driver.cuDeviceGet(ctypes.byref(device), int(sys.argv[1])),
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    driver.cuCtxSetCurrent(context),
    driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
):
    assert not failed
print("free", free.value, flush=True)
sys.stdin.read()
