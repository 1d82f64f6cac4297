# SPDX-License-Identifier: Apache-2.0
"""The batch script's process: runs the check, then the user's script, and passes signals on.

Slurm starts it in place of the script, as the job's user; it lives until the script ends. It
handles processes and signals, and records the script's start and end in the journal.

    supervisor       the process: first the check, then the script
    check_process    the check: starts it, reads its answer, ends its processes
    script_runs      the starts of the script, and the decision after a failure
    script_process   the script: starts it as Slurm would, forwards signals, ends it
    monitor_process  the monitor beside the script
    flight_recorder  variables that make the script's PyTorch record collectives
    post_mortem      after a failure: the process that explains it
    kept_spares      steps of ours that keep the script's steps off spare nodes
    batch_node_watch  a step on another node that ends the job if this node is lost
    recorder         records in the journal, and lines on standard error
    process_tree     a process with all that it has started
    signal_witness   distinguishes a signal to one process from one to a whole group
    environ          environments as bytes and as text
"""
