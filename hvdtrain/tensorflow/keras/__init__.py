"""The names of ``hvdtrain.keras``, under Horovod's other path.

::

    import hvdtrain.tensorflow.keras as hvd
"""

from __future__ import annotations

from hvdtrain.lazy import names_of

__getattr__, __dir__ = names_of("hvdtrain.keras")
