"""A real Kubernetes of one node, on this machine and apart from it, for tests.

``cluster.py`` has what tests use. ``node.py`` runs on the node: it is the first process there, and
whatever else runs ends with it. Its programs are an environment (``tests.environments``).
"""
