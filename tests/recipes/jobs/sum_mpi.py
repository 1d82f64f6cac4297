# SPDX-License-Identifier: Apache-2.0
"""Adds the ranks of an MPI job."""

from mpi4py import MPI

total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)
if MPI.COMM_WORLD.rank == 0:
    print(f"sum of the ranks {total}, {MPI.COMM_WORLD.size} processes", flush=True)
