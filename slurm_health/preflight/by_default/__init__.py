# SPDX-License-Identifier: Apache-2.0
"""Jobs that are checked because their site wants it, though their users typed plain `sbatch`.

slurmctld asks a few lines of Lua about each job that is submitted. They put a launcher before the
script of one that the site's rules name; whether they name it is decided again where the job
starts, by what it was given.

    installing      `init default`: writes the Lua, says the line of slurm.conf, takes both away
    job_submit.lua  what slurmctld loads; it can do nothing but call the next
    default.lua     looks at a job, and puts the launcher before its script
    at_start        on the batch host: whether the job is checked, and with what options
"""
