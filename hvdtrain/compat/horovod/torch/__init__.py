"""Horovod's API for PyTorch, which scripts import as ``hvdtrain.torch``."""
