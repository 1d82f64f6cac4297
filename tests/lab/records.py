# SPDX-License-Identifier: Apache-2.0
"""Reads what `scontrol show ... -o` prints; pure."""

import re

# Every field Slurm prints begins with a capital; our own drain reasons hold lower-case key=value
# words and are left whole.
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9:/_]*)=")


def parse_record(line: str) -> dict[str, str]:
    """One line of `scontrol show ... -o` as field → value."""
    fields = list(_FIELD.finditer(line))
    ends = [field.start() for field in fields[1:]] + [len(line)]
    return {
        field[1]: line[field.end() : end].strip() for field, end in zip(fields, ends, strict=True)
    }
