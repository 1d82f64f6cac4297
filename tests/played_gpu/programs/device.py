# SPDX-License-Identifier: Apache-2.0
"""Work of one device, until it is told to stop or fails; arguments: device, seconds, file."""

import os
import sys
import time

import torch

index, seconds = int(sys.argv[1]), float(sys.argv[2])
torch.cuda.set_device(index)
begun_s = time.monotonic()
left = torch.randint(-8, 8, (128, 128), device="cuda").float()
right = torch.randint(-8, 8, (128, 128), device="cuda").float()
expected = left.cpu() @ right.cpu()
print("opened", flush=True)
batch = int(os.environ.get("BATCH", "1"))  # so many are queued together
products = wrong = 0
times_ms = []
while time.monotonic() - begun_s < seconds:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    made = [left @ right for _ in range(batch)]
    end.record()
    end.synchronize()
    times_ms.append(begin.elapsed_time(end) / batch)
    products += batch
    wrong += sum(int((product.cpu() != expected).sum()) for product in made)
    if os.environ.get("PRODUCTS") == str(products):
        break
free, total = torch.cuda.mem_get_info()
print("products", products)
print("wrong", wrong)
print("first_ms", times_ms[0])
print("last_ms", times_ms[-1])
print("least_ms", min(times_ms))
print("free", free)
print("total", total)
