#!/bin/bash
#SBATCH --job-name=deepspeed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#HEALTH --setup=train-env.sh
source train-env.sh

hosts="hosts.$SLURM_JOB_ID"
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/ slots=1/' > "$hosts"
export hosts head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun bash -c 'deepspeed --hostfile="$hosts" --no_ssh --node_rank="$SLURM_NODEID" \
    --master_addr="$head" --master_port=29500 train_deepspeed.py'
