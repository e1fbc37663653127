"""The names of ``horovod.tensorflow.keras``, which are the same as in ``hvdtrain.keras``.

::

    import hvdtrain.tensorflow.keras as hvd
"""

from __future__ import annotations

from hvdtrain.lazy import names_of

__getattr__, __dir__ = names_of("hvdtrain.keras")
