"""``hvdtrain check``: tests whether a cluster is ready for training."""
