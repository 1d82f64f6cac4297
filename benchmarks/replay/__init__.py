# SPDX-License-Identifier: Apache-2.0
"""What slurm-health says of recordings of real clusters, which are not part of this project.

source    a row of the table: what was recorded, what of it was named
dumps     Flight Recorder dumps with ranks that were injected
kernel    kernel lines of GPUs and disks, with their severity
logs      logs of failed jobs with their causes
"""
