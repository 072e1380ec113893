#!/bin/bash
# Prolog= of slurm.conf, run as root on each node of a job: makes the directory of the job's capd socket.
# A job that has its own /tmp (job_container/tmpfs) still sees /run. Set PrologFlags=Alloc, so that it exists from
# the start of the job. A failure never drains the node.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
for number in "${SLURM_JOB_ID:-}" "${SLURM_JOB_UID:-}" "${SLURM_JOB_GID:-0}"; do
    case $number in
    *[!0-9]* | '') exit 0 ;;
    esac
done
directory=/run/capd/job-$SLURM_JOB_ID
[ -d /run/capd ] || mkdir -m 0755 /run/capd || exit 0
# Another owner could put a link there, and be given what it leads to.
if [ -L /run/capd ] || [ "$(stat -c %u /run/capd)" != 0 ]; then
    echo "capd: /run/capd does not belong to root, so no directory is made in it" >&2
    exit 0
fi
mkdir -m 0700 "$directory" && chown -h "$SLURM_JOB_UID:${SLURM_JOB_GID:-0}" "$directory"
exit 0
