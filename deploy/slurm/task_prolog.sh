#!/bin/bash
# TaskProlog= of slurm.conf, or srun --task-prolog: tells the tasks of jobs with CAPD=1 where their daemon is.
# Slurm sets what the lines `export NAME=VALUE` say, and shows what the lines `print TEXT` say.
[ "${CAPD:-0}" = 1 ] || exit 0
[ -n "${CAPD_ENDPOINT:-}" ] && exit 0
root=${CAPD_RUN_ROOT:-/run/capd}
# The job's own daemon comes before the one of the node.
for socket in "$root/job-$SLURM_JOB_ID/capd.sock" "$root/capd.sock"; do
    if [ -S "$socket" ]; then
        echo "export CAPD_ENDPOINT=unix:$socket"
        [ -n "${CAPD_RUN_ID:-}" ] || echo "export CAPD_RUN_ID=slurm-$SLURM_JOB_ID"
        exit 0
    fi
done
echo "print capd: no daemon listens on $(hostname) in $root; nothing is captured. Start one: srun --overlap capd serve"
