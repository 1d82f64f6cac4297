# SPDX-License-Identifier: Apache-2.0
"""A mistake on a device, or an error of it; arguments: which, how many products to begin with."""

import sys

import torch

which, products = sys.argv[1], int(sys.argv[2])
left = torch.ones(128, 128, device="cuda")
for _ in range(products):
    left = (left @ left).clamp(max=1)
    torch.cuda.synchronize()
if which == "too-much":
    torch.empty(1 << 40, device="cuda")
