# SPDX-License-Identifier: Apache-2.0
"""What a light worker may find beside it, as its sitecustomize.py: not ours, at the border."""

from __future__ import annotations

MISSING = """
import sys

sys.modules["numpy"] = None
"""

NO_TORCH = """
import sys

sys.modules["torch"] = None
"""

# numpy's library, which is called without numpy, gets one value of every product wrong.
LYING_LIBRARY = """
import ctypes

class Lying(ctypes.CDLL):
    def __getattr__(self, name):
        right = super().__getattr__(name)
        if "sgemm" not in name:
            return right

        def wrong(*arguments):
            right.argtypes = wrong.argtypes
            right(*arguments)
            size, result = arguments[3], arguments[12]
            ctypes.c_float.from_address(result + 4 * (size * size - 1)).value += 1

        return wrong

ctypes.CDLL = Lying
"""

# The same of a numpy that is loaded, as one must be that has no library beside it.
LYING = """
import numpy

right = numpy.matmul

def wrong(*arguments, out, **more):
    right(*arguments, out=out, **more)
    out[-1, -1] += 1
    return out

numpy.matmul = wrong
"""

# One bit of what arrives in large pieces changes on its way.
CHANGED_ON_THE_WAY = """
import socket

right = socket.socket.recv_into

def wrong(self, buffer, *arguments):
    count = right(self, buffer, *arguments)
    if count > 1000:
        buffer[7] ^= 1
    return count

socket.socket.recv_into = wrong
"""
