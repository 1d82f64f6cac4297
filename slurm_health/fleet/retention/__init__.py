# SPDX-License-Identifier: Apache-2.0
"""`slurm-health clean`: removes old journals. What goes is chosen in `fleet.retention.rules`.

removal   which journals there are, which of their jobs live, and how they are taken away
"""
