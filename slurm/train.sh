#!/usr/bin/env bash
#
# Trains on the tasks of a Slurm job, one MPI rank a task:
#
#   sbatch slurm/train.sh                                  the example, on 2 tasks
#   sbatch --ntasks=8 slurm/train.sh train.py --epochs 3   your program, on 8
#   sbatch --ntasks=8 --gpus-per-task=1 slurm/train.sh train.py
#
# Call it where the program and its Python environment (.venv, or PYTHON=...) are: a folder that
# all nodes share. Options given to sbatch win over those below.
#
#SBATCH --job-name=hvdtrain
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=hvdtrain-%j.out
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

# Open MPI from pip was built for another folder; without mpirun nobody tells it where it is now.
prefix=$("$PYTHON" -c 'import sys; print(sys.prefix)')
if [ -e "$prefix/bin/ompi_info" ]; then
    export OPAL_PREFIX="${OPAL_PREFIX:-$prefix}"
    # It knows no munge, which Slurm offers first.
    export PMIX_MCA_psec="${PMIX_MCA_psec:-native}"
fi

# Each rank computes with its task's cores. srun no longer takes --cpus-per-task from the job by
# itself (Slurm 22.05 and later).
cores=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK="$cores"
export TF_NUM_INTRAOP_THREADS="${TF_NUM_INTRAOP_THREADS:-$cores}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"

# How the ranks find each other: pmix for Open MPI; SLURM_MPI_TYPE=pmi2 for MPICH and Intel MPI
# (the latter also needs I_MPI_PMI_LIBRARY=/path/to/libpmi2.so). `srun --mpi=list` tells what this
# Slurm has. A rank that fails ends the others.
mpi=${SLURM_MPI_TYPE:-pmix}
if srun --mpi=list 2>&1 | grep -qw "$mpi"; then
    exec srun --mpi="$mpi" --kill-on-bad-exit=1 "$PYTHON" "$@"
fi

echo "slurm/train.sh: this Slurm has no --mpi=$mpi; starting through mpirun" >&2
PATH="$(dirname "$PYTHON"):$PATH"
exec mpirun -np "$SLURM_NTASKS" --bind-to none "$PYTHON" "$@"
