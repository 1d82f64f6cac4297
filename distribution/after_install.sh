#!/bin/sh
# After the files of the package, also on an upgrade. The scripts that slurm.conf names are no files
# of the package: nothing removes them, because a missing Prolog fails every job. They keep what
# the site has set in them.
set -e
case "$1" in
    configure | 1 | 2) /opt/slurm-health/bin/slurm-health init hooks >/dev/null ;;
esac
exit 0
