"""A real Kubernetes cluster with one node, in namespaces on this machine.

Tests use ``cluster.py``. ``node.py`` is the first process of the node, and all other processes end
with it. The programs of Kubernetes are an environment of ``tests.environments``.
"""
