# SPDX-License-Identifier: Apache-2.0
"""Played GPUs: PyTorch's CUDA build runs on a machine without one. See README.md."""
