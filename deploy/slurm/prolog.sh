#!/bin/bash
# Prolog= of slurm.conf, run as root on each node of a job: makes the directory of the job's capd socket.
# A job that has its own /tmp (job_container/tmpfs) still sees /run. Set PrologFlags=Alloc, so that it exists from
# the start of the job. A failure never drains the node.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
case ${SLURM_JOB_ID:-}/${SLURM_JOB_UID:-} in
*[!0-9/]* | /* | */) exit 0 ;;
esac
install -d -m 0755 -o root -g root /run/capd || exit 0
install -d -m 0700 -o "$SLURM_JOB_UID" -g "${SLURM_JOB_GID:-0}" "/run/capd/job-$SLURM_JOB_ID"
exit 0
