# SPDX-License-Identifier: Apache-2.0
"""Faults of a real training over NCCL on played GPUs: each recorded, and what is said of it.

causes      what happens, and what should be said of it
training    DDP, FSDP or a pipeline: what each rank runs, and what happens to it
perform     four ranks on two nodes that are played, with a monitor on each
gpus        what NVML tells of the GPUs of a node
native_stacks   where ranks are, with the frames of C++
recording   what is kept of a run: the files, written without names of this machine, and read
say         what the post-mortem, the monitor and the check of GPUs say of a recording
"""
