# SPDX-License-Identifier: Apache-2.0
"""A process beside the job: after its script has failed, it collects what can be known and why.

The supervisor starts it and does not wait for it for long. What touches the world is in its
collectors, each in a child of its own that is killed when it hangs; what is inferred is
`core.diagnosis`'s.

    post_mortem   collect, diagnose, say, record
    containment   collectors and operators of others, run so that they can raise and hang
    registry      the collectors and operators there are, other distributions' too
    collector     what a collector is, and what it is told of the job
    job_output    collector: the ends of the job's output files
    srun_output   which files the script had srun write
    slurm_word    collector: Slurm's own view of job and nodes
    kernel        collectors: kills for memory, and the kernel's log
    flight_dumps  collector: Flight Recorder dumps
"""
