"""The names of ``hvdtrain.keras``, under the path of ``horovod.tensorflow.keras``.

::

    import hvdtrain.tensorflow.keras as hvd
"""

from __future__ import annotations

from hvdtrain.lazy import names_of

__getattr__, __dir__ = names_of("hvdtrain.keras")
