"""A cluster of four hosts on this machine, with real sshd, Slurm and munge in namespaces.

See ``cluster`` for the hosts and ``plugin`` for the fixtures.
"""
