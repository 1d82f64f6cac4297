#!/bin/sh
# Before the files of the package: dpkg says `install`, rpm says 1, and both say else on an upgrade.
set -e
case "$1" in
    install | 1)
        if [ -e /opt/slurm-health/pyvenv.cfg ]; then
            echo "slurm-health: /opt/slurm-health is a virtual environment already; move it away first" >&2
            exit 1
        fi
        ;;
esac
exit 0
