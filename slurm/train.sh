#!/usr/bin/env bash
#
# Train on the tasks of a Slurm job, one MPI rank per task:
#
#   sbatch slurm/train.sh                                  the example, on 2 tasks
#   sbatch --ntasks=8 slurm/train.sh train.py --epochs 3   your program, on 8
#   sbatch --ntasks=8 --gpus-per-task=1 slurm/train.sh train.py
#   srun --ntasks=8 --mpi=pmix slurm/train.sh train.py     the same without sbatch
#
# Run it in a folder that all nodes share, with the program and its Python environment (.venv, or
# PYTHON=...). Options of sbatch or srun override the ones below.
#
#SBATCH --job-name=hvdtrain
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=hvdtrain-%j.out
#
# Slurm signals this script 90 seconds before the time limit (or up to a minute earlier), and the script
# signals the ranks: a program with hvdtrain.Checkpoint saves and exits with code 75. The job is then
# requeued under its own number and resumes from the checkpoint. HVDTRAIN_MAX_REQUEUES (default 100)
# limits the number of requeues; 0 forbids them.
#SBATCH --signal=B:USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#
# For one GPU per task, remove one # from the next line:
##SBATCH --gpus-per-task=1

set -euo pipefail

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "slurm/train.sh: not in a Slurm job; submit it: sbatch slurm/train.sh" >&2
    exit 2
fi
# Slurm runs a copy of this script, so the folder of $0 is not the repository.
cd "${SLURM_SUBMIT_DIR:-$PWD}"

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)
fi
[ $# -gt 0 ] || set -- examples/mnist.py

# Since Slurm 22.05, srun does not inherit --cpus-per-task from the job.
cores=${SLURM_CPUS_PER_TASK:-1}

if [ -n "${SLURM_STEP_TASKS_PER_NODE:-}" ]; then
    # srun started this script once per task, so this process is a rank.
    export TF_NUM_INTRAOP_THREADS="${TF_NUM_INTRAOP_THREADS:-$cores}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"
    # Open MPI from pip was built for another prefix and without munge, which Slurm offers first.
    prefix=$("$PYTHON" -P -c 'import sys; print(sys.prefix)')
    if [ -e "$prefix/bin/ompi_info" ]; then
        export OPAL_PREFIX="${OPAL_PREFIX:-$prefix}"
        export PMIX_MCA_psec="${PMIX_MCA_psec:-native}"
    fi
    exec "$PYTHON" "$@"
fi

# hvdtrain run starts the ranks through srun. SLURM_MPI_TYPE=pmi2 (or another plug-in of
# `srun --mpi=list`) overrides the plug-in; with Intel MPI and pmi2 also set
# I_MPI_PMI_LIBRARY=/path/to/libpmi2.so.
export SRUN_CPUS_PER_TASK="$cores"
if [ -n "${HVDTRAIN_JOB_FOLDER:-}" ]; then
    # hvdtrain submit passes options of hvdtrain run and the complete command.
    run=("$@")
else
    run=(-- "$PYTHON" "$@")
fi
"$PYTHON" -P -m hvdtrain run "${run[@]}" &
launcher=$!

# With the launcher in the foreground, bash would handle signals only after it has ended. A signal
# interrupts `wait`, which must then be called again for the exit code.
forward() {
    forwarded=yes
    kill "-$1" "$launcher" 2>/dev/null || true
}
for name in USR1 USR2 TERM HUP; do
    trap "forward $name" "$name"
done
# Background processes ignore Ctrl-C.
trap 'forward TERM' INT
while :; do
    forwarded=
    code=0
    wait "$launcher" || code=$?
    [ -n "$forwarded" ] || break
done

# Code 75: preempted. After scancel or a requeue by Slurm the code is another one (143).
[ "$code" -eq 75 ] || exit "$code"
restarts=${SLURM_RESTART_COUNT:-0}
if [ "$restarts" -ge "${HVDTRAIN_MAX_REQUEUES:-100}" ]; then
    echo "slurm/train.sh: preempted; not requeued after $restarts requeues (HVDTRAIN_MAX_REQUEUES)" >&2
elif ! command -v scontrol >/dev/null; then
    echo "slurm/train.sh: preempted; not requeued, because scontrol is not on this node's PATH." \
        "On a login node: scontrol requeue $SLURM_JOB_ID" >&2
elif (trap '' TERM && exec scontrol requeue "$SLURM_JOB_ID"); then
    # Slurm then ends all processes of the job, scontrol included; without SIGTERM it can return.
    echo "slurm/train.sh: preempted; job $SLURM_JOB_ID is requeued" >&2
else
    echo "slurm/train.sh: preempted; scontrol failed to requeue it" >&2
fi
exit "$code"
