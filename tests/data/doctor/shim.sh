#!/bin/sh
python={python}
config={config}
slurm={slurm}
limit=50
PATH=$slurm:/usr/sbin
timeout "$limit" "$python" -I -m slurm_health.node.hooks prolog "$config"
