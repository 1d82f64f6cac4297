# SPDX-License-Identifier: Apache-2.0
"""Write what is frozen anew, or say what differs."""

import argparse
import sys

from tests.frozen.store import TABLES, differences, generated, write


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    options = parser.parse_args()
    unknown = sorted({*options.tables} - {*TABLES})
    if unknown:
        parser.error(f"no such table: {', '.join(unknown)}; there are {', '.join(TABLES)}")
    differs = False
    for table in options.tables or TABLES:
        now = generated(table)
        for line in differences(table, now):
            differs = True
            print(line)
        if not options.check:
            write(table, now)
    return int(options.check and differs)


if __name__ == "__main__":
    sys.exit(main())
