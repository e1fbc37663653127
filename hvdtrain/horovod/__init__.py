"""Horovod's API on top of the gradient reducer of ``hvdtrain.distribute``.

Scripts import it as ``hvdtrain.tensorflow``, ``hvdtrain.tensorflow.keras`` or ``hvdtrain.keras``.
"""
