case "$*" in
"show job -o 4") cat job-running.txt ;;
"show job -o 5") cat job-requeued-held.txt ;;
"show job -o 18") cat job-array.txt ;;
"show job -o 19" | "show job -o 18_1") grep ArrayTaskId=1 job-array.txt ;;
"show job -o 20") cat job-odd-name.txt ;;
"show job -o "*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;;
"show node -o n1") cat node-idle.txt ;;
"show node -o n2") cat node-drained.txt ;;
"show node -o n[1-2]" | "show nodes -o") cat node-idle.txt node-drained.txt ;;
*) echo "Node $4 not found" >&2; exit 1 ;;
esac
