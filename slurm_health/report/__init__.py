# SPDX-License-Identifier: Apache-2.0
"""What became of a job, from its journal's files alone: as a table, and as JSON.

    find      the directories of a job, their files' entries            edge
    from_run  the entries of one check   -> RunReport                    pure
    from_job  the checks of one job      -> JobReport                    pure
    table     a report -> text           export   a report -> JSON       pure

Loads neither torch nor numpy, so it works on any login node, at any time, during the run too.
"""
