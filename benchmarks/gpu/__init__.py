# SPDX-License-Identifier: Apache-2.0
"""What one GPU can show, in nine sections; `python -m benchmarks.gpu --help`.

step              what is measured in one go, how much of it, and what comes out
machine           the interpreter with torch, the devices, and their versions
child             a process of that interpreter that is spoken to
figures_file      what has been measured so far, so that a later call continues
sections          the nine, in their order
probe_spread      1: how fast each probe is, and how far its runs lie apart
partner_death     2: whole checks, healthy and with a worker that dies, hangs or raises
check_local       a check of this machine, and the fault it is given
group_cycles      3: process groups formed and left again, and what they leave behind
memory_release    4: how soon the memory of killed workers is free
gpt_memory        5: what a GPT takes, against its estimate, and what happens without memory
first_use         6: what is slow the first time
flipped_bit       7: whether one wrong bit is found
chosen_devices    8: what the variables that choose devices do
nccl_log          9: whether NCCL's log gets in anybody's way
on_device         what runs in the interpreter with torch
"""
