# SPDX-License-Identifier: Apache-2.0
"""The only place that loads torch.

These modules run in the training job's own interpreter (`--python`), which may be older than the
one slurm-health runs in and has none of its other dependencies: they use the standard library and
torch, and nothing else of this package.
"""
