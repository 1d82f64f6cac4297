# SPDX-License-Identifier: Apache-2.0
"""The driver's own calls, by plain dlopen and without PyTorch; argument "crash": a bad pointer."""

import ctypes
import sys
from pathlib import Path

driver = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    error = getattr(driver, name)(*arguments)
    assert error == 0, f"{name}: {error}"


number, context = ctypes.c_int(), ctypes.c_void_p()
call("cuInit", 0)
call("cuDeviceGetCount", ctypes.byref(number))
print("devices", number.value)
call("cuDeviceGet", ctypes.byref(number), 1)
name = ctypes.create_string_buffer(100)
call("cuDeviceGetName", name, 100, number)
print("name", name.value.decode())
uuid = ctypes.create_string_buffer(16)
call("cuDeviceGetUuid", uuid, number)
print("uuid", uuid.raw.hex())
call("cuCtxCreate_v2", ctypes.byref(context), 0, number)

first, second = ctypes.c_void_p(), ctypes.c_void_p()
call("cuMemAlloc_v2", ctypes.byref(first), ctypes.c_size_t(64))
call("cuMemAlloc_v2", ctypes.byref(second), ctypes.c_size_t(64))
call("cuMemsetD8_v2", first, ctypes.c_ubyte(7), ctypes.c_size_t(64))
call("cuMemcpyHtoD_v2", first, b"played", ctypes.c_size_t(6))
call("cuMemcpyDtoD_v2", second, first, ctypes.c_size_t(64))
back = ctypes.create_string_buffer(8)
call("cuMemcpyDtoH_v2", back, second, ctypes.c_size_t(8))
print("memory", back.raw)
free, total = ctypes.c_size_t(), ctypes.c_size_t()
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
print("total", total.value)
call("cuMemFree_v2", first)
print("freed twice", driver.cuMemFree_v2(first))
loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
of_nvidia = {
    Path(path).parent.resolve() for path in loaded if "libcuda" in path or "nvidia" in path
}
print("libraries from", *of_nvidia)
if "crash" in sys.argv:
    sys.stdout.flush()
    driver.cuMemsetD8_v2(ctypes.c_void_p(64), ctypes.c_ubyte(1), ctypes.c_size_t(8))
