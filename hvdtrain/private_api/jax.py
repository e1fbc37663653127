"""Private API of JAX."""

from __future__ import annotations

import jax

from hvdtrain.errors import LaunchError
from hvdtrain.private_api import PrivateApi

_API = PrivateApi(
    library="JAX", version=jax.__version__, tested=("0.10", "0.10"), error=LaunchError
)

try:
    from jax._src import xla_bridge

    # Returns whether JAX uses its devices already. It does so on first use, and keeps them.
    in_use = xla_bridge.backends_are_initialized
except (ImportError, AttributeError) as error:
    raise _API.missing(error) from error

__all__ = ["in_use"]
