#!/bin/bash -l
#SBATCH --job-name=accelerate
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#HEALTH --setup=train-env.sh
source train-env.sh

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
hosts="hosts.$SLURM_JOB_ID"
scontrol show hostnames "$SLURM_JOB_NODELIST" > "$hosts"

accelerate launch --cpu --mixed_precision no --dynamo_backend no \
    --num_machines "$SLURM_NNODES" --num_processes "$SLURM_NNODES" --mpirun_hostfile "$hosts" \
    --main_process_ip "$head" --main_process_port 29555 train_accelerate.py
