# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.lab`."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
