# SPDX-License-Identifier: Apache-2.0
"""What is decided, and the words it is decided in.

Pure: functions from values to values, without files, clock, environment, network or logging. Any
process may call them.

    records         what a journal holds: one type for each kind of record
    record_codec    a record to a line of a journal, and back
    orders          what agents are to hear of the records, so that each reads only its part
    attribution     whose doing a failure is, and how sure that is
    verdict         rounds, what came out of them, and what is concluded about each node
    allocation      a job's allocation, from its SLURM_ variables
    same_job        which checks below one job id belong to one job
    nodeset         node lists as Slurm writes them, to names and back
    probe_catalog   which probes there are, who runs each, which part of a node it is about
    played_nodes    which devices each node has that processes of one machine play
    gpu_load        what GPUs reported while they were under load
    expectations    what a healthy device of a known model reaches
    sweep           which idle nodes are checked next, and with whom
    exposition      metrics as Prometheus reads them
    retention       which journals may go, by age and size
    text            foreign text made safe for a terminal, a log, or a field of Slurm
    diagnosis       a room of its own: a failed script to its cause
    localize        a room of its own: evidence to a verdict
    history         a room of its own: many checks to what they say of a node together
    session         a room of its own: the journal to the master's next step
    acting          a room of its own: a verdict to what becomes of the job and its nodes
    node            a room of its own: what a hook finds to what becomes of the node
"""
