"""A cluster of four hosts on this machine; see ``cluster`` for what it is and ``plugin`` for tests.

Modelled on no cluster in particular: real sshd, Slurm and munge in namespaces of their own.
"""
