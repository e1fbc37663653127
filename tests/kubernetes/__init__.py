"""A real Kubernetes with one node, in namespaces on this machine.

``cluster.py`` is used by tests. ``node.py`` is the first process of the node; all others end with
it. Its programs are an environment of ``tests.environments``.
"""
