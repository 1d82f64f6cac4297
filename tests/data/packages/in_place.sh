mkdir /root/of-another && echo 'raise SystemExit("of another Python")' > /root/of-another/click.py
PYTHONPATH=/root/of-another slurm-health --version
slurm-health templates sweep | head -n 1
slurm-health templates dashboard | grep -c '"title": "slurm-health"'
ls /usr/share/bash-completion/completions/slurm-health
grep ^python= /etc/slurm-health/prolog/slurm-health
slurm-health init hooks /root/hooks
slurm-health doctor | grep 'do: nothing, or as root: documentation' || true
/opt/slurm-health/bin/python -c 'import torch' 2>&1 | tail -n 1
sed -i s/limit=120/limit=90/ /etc/slurm-health/prolog/slurm-health
echo '[hooks]' > /etc/slurm-health/config.toml
