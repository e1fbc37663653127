"""hvdtrain beside its peers: which ways there are, which jobs run, and what is shown of them.

``against_peers.py`` is the command, and ``peer_rank.py`` what each rank of a job runs, with the
modules of ``ranks``. ``ways``, ``commands``, ``plan`` and ``summary`` decide and touch nothing;
``running`` starts jobs, and ``plots`` draws.
"""
