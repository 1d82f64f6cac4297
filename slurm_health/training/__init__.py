# SPDX-License-Identifier: Apache-2.0
"""While a script runs, and when it has failed.

What these find goes into the job's journal, where the report reads it.

    diagnosis       symptom -> cause. Pure
    framework       collectors, diagnosticians and chains, as a site subclasses them, too. Pure
    monitor         beside a script: sees it hang; after it has failed: says why
    in_ranks        in the ranks themselves: a heartbeat for scripts without one
    restart         after a script has failed: it is started again, here or elsewhere
"""
