# SPDX-License-Identifier: Apache-2.0
"""Decisions: pure functions and values. No I/O, clock, environment, logging, torch or click."""
