cat /etc/slurm-health/config.toml
grep ^limit= /etc/slurm-health/prolog/slurm-health
/etc/slurm-health/prolog/slurm-health && echo jobs start
test ! -e /opt/slurm-health && echo gone
