# SPDX-License-Identifier: Apache-2.0
"""From the journal to the master's next step. Pure.

The master calls it: it folds what it has read, asks for the next step, and takes it.

    controller     from what is known to what the master does next
    state          what is known: the fold of a check's journal
    deadlines      how long nodes and rounds may take
    absent         which nodes take part, and the verdict on those that do not
    phases         what a check consists of: probes, and the phases that run them
    course         takes the phases in order: the next round, and what all of them conclude
    measurement    raw samples to measured values and group results
    storage        whose fault it is that storage is slow or fails
    conclusion     the Localizer's verdict, and what else is known, to a record
"""
