#!/usr/bin/env bash
#
# Trains on the tasks of a Slurm job, one MPI rank a task:
#
#   sbatch slurm/train.sh                                  the example, on 2 tasks
#   sbatch --ntasks=8 slurm/train.sh train.py --epochs 3   your program, on 8
#   sbatch --ntasks=8 --gpus-per-task=1 slurm/train.sh train.py
#   srun --ntasks=8 --mpi=pmix slurm/train.sh train.py     the same without sbatch
#
# Call it where the program and its Python environment (.venv, or PYTHON=...) are: a folder that
# all nodes share. Options given to sbatch or srun win over those below.
#
#SBATCH --job-name=hvdtrain
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=hvdtrain-%j.out
#
# 90 seconds before the time is over (Slurm may be a minute early) this script is told, and tells the
# ranks: a program with hvdtrain.Checkpoint saves what it has and ends with code 75. Then the job goes
# back into the queue under its own number, and goes on from the checkpoint when its turn comes.
# HVDTRAIN_MAX_REQUEUES=0 sbatch ... forbids it; default 100.
#SBATCH --signal=B:USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#
# With GPUs, one for each task; remove one # of the two:
##SBATCH --gpus-per-task=1

set -euo pipefail

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "slurm/train.sh: this is no Slurm job; submit it: sbatch slurm/train.sh" >&2
    exit 2
fi
# Slurm runs a copy of this script, so its own folder says nothing.
cd "${SLURM_SUBMIT_DIR:-$PWD}"

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || command -v python3)
fi
[ $# -gt 0 ] || set -- examples/mnist.py

# Each rank computes with its task's cores. srun no longer takes --cpus-per-task from the job by
# itself (Slurm 22.05 and later).
cores=${SLURM_CPUS_PER_TASK:-1}

if [ -n "${SLURM_STEP_TASKS_PER_NODE:-}" ]; then
    # srun has started this script once for each task: each is a rank already.
    export TF_NUM_INTRAOP_THREADS="${TF_NUM_INTRAOP_THREADS:-$cores}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"
    # Open MPI from pip was built for another folder, and knows no munge, which Slurm offers first.
    prefix=$("$PYTHON" -P -c 'import sys; print(sys.prefix)')
    if [ -e "$prefix/bin/ompi_info" ]; then
        export OPAL_PREFIX="${OPAL_PREFIX:-$prefix}"
        export PMIX_MCA_psec="${PMIX_MCA_psec:-native}"
    fi
    exec "$PYTHON" "$@"
fi

# hvdtrain run starts the ranks through srun, shows their output, and says which failed first.
# SLURM_MPI_TYPE=pmi2 (or another of `srun --mpi=list`) overrides how they find each other; with
# Intel MPI and pmi2 set I_MPI_PMI_LIBRARY=/path/to/libpmi2.so as well.
export SRUN_CPUS_PER_TASK="$cores"
if [ -n "${HVDTRAIN_JOB_FOLDER:-}" ]; then
    # hvdtrain submit gives the options of hvdtrain run as well, and the whole command.
    run=("$@")
else
    run=(-- "$PYTHON" "$@")
fi
"$PYTHON" -P -m hvdtrain run "${run[@]}" &
launcher=$!

# bash would only see a signal when the ranks have ended. A signal also ends `wait`, which then has to
# be called again for the exit code.
pass_on() {
    passed_on=yes
    kill "-$1" "$launcher" 2>/dev/null || true
}
for name in USR1 USR2 TERM HUP; do
    trap "pass_on $name" "$name"
done
# In the background Ctrl-C would be ignored.
trap 'pass_on TERM' INT
while :; do
    passed_on=
    code=0
    wait "$launcher" || code=$?
    [ -n "$passed_on" ] || break
done

# 75: preempted. After scancel, or where Slurm itself takes the nodes away, it is another code (143),
# and the job is cancelled, or back in the queue already.
[ "$code" -eq 75 ] || exit "$code"
restarts=${SLURM_RESTART_COUNT:-0}
if [ "$restarts" -ge "${HVDTRAIN_MAX_REQUEUES:-100}" ]; then
    echo "slurm/train.sh: preempted, and not queued again: it was $restarts times before" >&2
elif ! command -v scontrol >/dev/null; then
    echo "slurm/train.sh: preempted, and not queued again: scontrol is not on this node's PATH." \
        "On a login node: scontrol requeue $SLURM_JOB_ID" >&2
elif (trap '' TERM && exec scontrol requeue "$SLURM_JOB_ID"); then
    # Slurm then ends what runs in the job: scontrol, too, which would not have come back yet.
    echo "slurm/train.sh: preempted; job $SLURM_JOB_ID is in the queue again" >&2
else
    echo "slurm/train.sh: preempted, and scontrol did not queue it again" >&2
fi
exit "$code"
