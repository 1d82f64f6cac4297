#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
# One training process per node. Submit with: slurm-health sbatch -N 5 train.sh --epochs 2
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500 TORCH_CPP_LOG_LEVEL=ERROR
echo "training on $SLURM_JOB_NODELIST"
srun python3 "$SLURM_SUBMIT_DIR/train.py" "$@"
