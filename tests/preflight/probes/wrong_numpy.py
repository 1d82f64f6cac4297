# SPDX-License-Identifier: Apache-2.0
"""What a light worker may find beside it, as its sitecustomize.py: not ours, at the border."""

NO_TORCH = """
import sys

sys.modules["torch"] = None
"""

# One value of every product is off by one.
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
