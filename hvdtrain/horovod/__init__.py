"""Horovod's API, made of the same reducer as ``hvdtrain.distribute``.

Scripts find it under Horovod's own paths: ``hvdtrain.tensorflow``, ``hvdtrain.tensorflow.keras``
and ``hvdtrain.keras``.
"""
