# SPDX-License-Identifier: Apache-2.0
"""Jobs that are checked by the rules of their site, though their users typed plain `sbatch`.

slurmctld runs a few lines of Lua on every submitted job. They put a launcher before the script of a
job that the rules name. The launcher decides again on the batch host, by what the job was given.

    installing      `init default`: writes and removes the Lua, gives the line of slurm.conf
    job_submit.lua  loaded by slurmctld; does nothing but call the next
    default.lua     reads a job, and puts the launcher before its script
    at_start        on the batch host: whether the job is checked, and with what options
"""
