# SPDX-License-Identifier: Apache-2.0
"""The batch script's process: runs the check, then the user's script, and passes signals on.

Slurm starts it in place of the script, as the job's user; it stays until the script ends. It
touches processes and signals, and records the script's start and end in the journal.

    supervisor       the process: first the check, then the script
    check_process    the check: started, listened to, ended with everything it started
    script_runs      the script, as often as it is started, and what follows its failure
    script_process   the script: started as Slurm would, sent what Slurm sent only to us, ended
    monitor_process  the monitor beside the script: started and ended with it
    flight_recorder  variables that have the script's PyTorch record, where the journal answers
    post_mortem      after a failure: waits for the process that says why, and not for long
    kept_spares      steps of ours that keep the script's steps off spare nodes
    batch_node_watch  a step elsewhere that gives the job back if this node is lost
    recorder         what the supervisor writes to the journal, and says
    signal_witness   tells a signal to one process from one to a whole group
"""
