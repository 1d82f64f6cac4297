# SPDX-License-Identifier: Apache-2.0
"""Faults in a real training on the lab, one after another: is each named, and no healthy node?"""
