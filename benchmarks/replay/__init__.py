# SPDX-License-Identifier: Apache-2.0
"""What slurm-health says of recordings of real clusters, which are not part of this project.

source    a row of the table: what was recorded, what of it was named
dumps     Flight Recorder dumps with ranks that were injected
kernel    kernel lines of GPUs and disks, with their severity
logs      logs of failed jobs with their causes
paces     steps of trainings with slow ranks, uneven stages, uneven data
monitors  what the tests of other monitors of nodes hold of kernel lines and diagnostics
matches   pairs of Flight Recorder entries, with whether they match
diagnostics  what DCGM reports, and holds of each error that it may report
chronicles  logs in the pages of people who trained large models
threads   logs in the issues of public projects, with what their threads found
"""
