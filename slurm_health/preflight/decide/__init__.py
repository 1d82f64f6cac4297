# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what becomes of the job and its nodes. Pure.

Called by the process that acts on a verdict; `acting` performs what is decided here.

    policy            what the user and the site allow to be done about a verdict
    facts             what the job and its owner can do, whether it could start elsewhere at once
    decision          the values that say what is decided, each with its reason
    decide            one decision: drains, a smaller job, how it ends
    paths             which nodes it leaves because of a bad path between two of them
    check_again       which check precedes a restart of a failed script
    unchecked         what becomes of a job whose nodes could not be checked
"""
