# SPDX-License-Identifier: Apache-2.0
"""What makes the wheel, the `.deb` and the `.rpm`; none of it is installed.

Each module's part in that:

    man_pages   a page for each command, from what it says of itself
    completion  the files with which shells complete commands
    build_hook  adds both to a wheel while it is built
    packages    `make packages`: the `.deb` and the `.rpm` of this machine's distribution
"""
