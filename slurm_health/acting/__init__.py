# SPDX-License-Identifier: Apache-2.0
"""Carries out what `core.acting` decided: records, drains, shrinks, and leaves at last.

Runs in the process of the master, and in the helper job that a requeue elsewhere needs.
"""
