"""Horovod's API, built on the same gradient reducer as ``hvdtrain.distribute``.

Scripts import it as ``hvdtrain.tensorflow``, ``hvdtrain.tensorflow.keras`` or ``hvdtrain.keras``.
"""
