# SPDX-License-Identifier: Apache-2.0
"""The check of a job, from its submission to the start of its script.

What is pure decides; what stands beside it performs.

    localize        evidence -> verdict. Pure
    decide          verdict -> what becomes of the job and its nodes. Pure
    session         journal -> the master's next step. Pure
    expectations    what a healthy device of a known model reaches. Pure
    orders          the file of those lines, each agent reads its own part; the doorbell
    job_spec        all that was asked for a job, from submission to check and journal
    options         the options that ask for it: on command lines, in variables, in scripts
    chosen_probes   which probes `--check` asks for
    config          the settings that users' commands read
    sbatch          `slurm-health sbatch`: a job's text, options and submission
    by_default      jobs whose site has them checked, though their users typed plain `sbatch`
    supervisor      the batch script's process: the check, then the user's script
    master          on a job's first node: leads one check, from allocation to verdict
    agent           on every node of a job: runs the workers, writes what they measured
    probes          the workers, one per device: standard library, and torch or numpy; no more
    acting          carries out what was decided; the helper job of a requeue
"""
