#!/bin/bash
#SBATCH --job-name=jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#HEALTH --setup=train-env.sh
source train-env.sh

srun python3 train_jax.py
