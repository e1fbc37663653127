"""The command ``hvdtrain check``, which tests whether a cluster is ready for training."""
