"""The comparison of hvdtrain with its peers: candidates, jobs and tables.

``against_peers.py`` is the command; each rank of a job runs ``peer_rank.py`` with a module of
``ranks``. ``ways``, ``commands``, ``plan`` and ``summary`` are pure; ``running`` starts jobs.
"""
