#!/bin/bash
#SBATCH --job-name=ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#HEALTH --setup=train-env.sh
source train-env.sh
export RAY_raylet_start_wait_time_s=300  # nodes that share two processors

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
address=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address)
log="ray.$SLURM_JOB_ID"

srun --nodes=1 --ntasks=1 -w "${nodes[0]}" ray start --head --node-ip-address="$address" \
    --port=6379 --num-cpus=1 --include-dashboard=false --disable-usage-stats --block \
    > "$log.head" 2>&1 &
until grep -q 'Ray runtime started' "$log.head"; do
    kill -0 $! || { cat "$log.head"; exit 1; }
    sleep 1
done
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 -w "$node" ray start --address="$address:6379" --num-cpus=1 \
        --block > "$log.$node" 2>&1 &
done

RAY_ADDRESS=$address:6379 python3 -u train_ray.py
