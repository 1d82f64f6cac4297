# SPDX-License-Identifier: Apache-2.0
"""After a script has failed: it is started again here, on a spare, or elsewhere, or the job ends.

The supervisor starts this as a process, as it starts the check, and hears the same kind of answer.
What is done is decided in `preflight.decide.after_failure`; here Slurm and the journal are asked
what that rests on, and it is carried out: by a check, or by acting on what is known already.

    after_failure    from a failed script to what becomes of the job
    evidence         what Slurm and the journal know of the failure
"""
