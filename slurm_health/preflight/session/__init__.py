# SPDX-License-Identifier: Apache-2.0
"""From the journal to the master's next step. Pure.

The master calls it: it replays what it has read, asks for the next step, and takes it.

    session        the state machine: from what is known to what the master does next
    deadlines      how long nodes and rounds may take
    run_state      what is known: the fold of a run's journal
    round_state    what is known of the round in progress, and of each node's agent and workers
    absent         which nodes take part, and what is said of those that do not
    phases         what a check consists of: probes, and the phases that run them
    phase_runner   takes the phases in order: the next round, and what all of them conclude
    node_round     one node's part in one round: its groups, its results, how it ended
    measurement    raw samples to measured values and group results
    conclusion     the Localizer's verdict, and what could not be measured, to a record
"""
