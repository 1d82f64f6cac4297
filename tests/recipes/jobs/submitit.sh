#!/bin/bash
# On the login node. ~/bin has the sbatch that calls slurm-health's.
export PATH=$HOME/bin:$PATH
source train-env.sh
python3 submit_submitit.py
