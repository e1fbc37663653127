"""A fence of PMIx, for ranks that Slurm let out of MPI's own too early.

Open MPI 5 starts with a fence that carries addresses, and ends its start with an empty one. Slurm's
plug-in passes the first around a ring and the second up and down a tree; the tree lets some ranks
go before the others have come (seen with Slurm 22.05.8: on four hosts that have much to do, in one
job of ten). What those send finds no communicator, and who receives it dies in ``MPI_Init`` of
SIGSEGV. One more fence that asks for data, of which there is none, takes the ring: none sends
before all have started.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["fence"]


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
    """Wait until all ranks of the job are here, once MPI has started on this one.

    Returns:
        Whether it did; not where MPI has come without PMIx (MPICH), or speaks to no server of it.
    """
    try:
        # What MPI has loaded, and nothing else.
        pmix = ctypes.CDLL("libpmix.so.2", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    asked = _Info(_COLLECT_DATA, 0, _Value(_BOOL, _Data(True)))
    all_ranks, count = None, ctypes.c_size_t(0)
    return pmix.PMIx_Fence(all_ranks, count, ctypes.byref(asked), ctypes.c_size_t(1)) == 0
