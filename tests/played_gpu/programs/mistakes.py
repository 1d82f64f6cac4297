# SPDX-License-Identifier: Apache-2.0
"""A mistake on a device, or an error of it; arguments: which, how many products to begin with."""

import sys

import torch

which, products = sys.argv[1], int(sys.argv[2])
left = torch.ones(128, 128, device="cuda")
for _ in range(products):
    left = (left @ left).clamp(max=1)
    torch.cuda.synchronize()
match which:
    case "too-much":
        torch.empty(1 << 40, device="cuda")
    case "to-neighbour":
        left.to("cuda:1")
    case "normalise":
        torch.nn.BatchNorm2d(16, device="cuda")(left.reshape(8, 16, 8, 16))
