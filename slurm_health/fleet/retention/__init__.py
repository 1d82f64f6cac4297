# SPDX-License-Identifier: Apache-2.0
"""`slurm-health clean`: removes old journals. What goes is chosen in `fleet.retention.rules`.

listing   which journals there are, and which of their jobs live
remove    takes them away, so that each is there whole or not at all
"""
