# SPDX-License-Identifier: Apache-2.0
"""What became of a job, from its journal's files alone: as a table, and as JSON.

    find       the directories of a job -> their files' entries        edge
    build      entries -> model         with acts and figures          pure
    model      JobReport, RunReport and what they hold                 values
    table      model -> text            with phrases and layout        pure
    export     model -> JSON                                           pure

Loads neither torch nor numpy, so it works on any login node, at any time, during the run too.
"""
