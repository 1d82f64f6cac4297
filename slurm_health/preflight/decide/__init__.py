# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what becomes of the job and its nodes. Pure.

Called by the process that acts on a verdict; `acting` performs what is decided here.

    policy            what the user and the site allow
    facts             what the job and its owner can do, and the notes that are left on a job
    decide            one decision: which nodes to drain, to give back and to leave, how it ends
    paths             which nodes to leave because of a bad path between two of them
    check_again       which check precedes the restart of a failed script
    unchecked         what becomes of a job whose nodes could not be checked
"""
