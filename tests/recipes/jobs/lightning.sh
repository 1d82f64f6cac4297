#!/bin/bash -l
#SBATCH --job-name=lightning
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --signal=SIGUSR1@90
#HEALTH --setup=train-env.sh
source train-env.sh

srun python3 train_lightning.py
