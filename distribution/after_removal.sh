#!/bin/sh
# After the package is gone: dpkg says `remove`, rpm says 0, and both say else on an upgrade.
set -e
case "$1" in
    remove | 0)
        echo "slurm-health: /etc/slurm-health stays, because a missing Prolog fails every job:" >&2
        echo "slurm-health: take its lines out of slurm.conf before you remove it" >&2
        ;;
esac
exit 0
