# SPDX-License-Identifier: Apache-2.0
"""A device that computes wrong results, as far as one can be had: at the border to torch."""

from __future__ import annotations

# A sitecustomize.py with which one value of every product is off by one.
SITECUSTOMIZE = """
import torch

right = torch.mm

def wrong(*arguments, **more):
    result = right(*arguments, **more)
    result[-1, -1] += 1
    return result

torch.mm = wrong
"""
