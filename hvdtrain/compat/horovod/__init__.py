"""Horovod's API. It averages gradients with the same code as ``hvdtrain.distribute``.

Scripts import it as ``hvdtrain.tensorflow``, ``hvdtrain.tensorflow.keras``, ``hvdtrain.keras`` or
``hvdtrain.torch``, which only name what ``names`` lists.
"""
