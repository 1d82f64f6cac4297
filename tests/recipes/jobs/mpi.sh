#!/bin/bash
#SBATCH --job-name=mpi
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#HEALTH --setup=train-env.sh
source train-env.sh

srun --mpi=pmix python3 sum_mpi.py
mpirun python3 sum_mpi.py
