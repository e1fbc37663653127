"""The acceptance suite for GPUs: ``python -m tests.gpu`` or ``make test-gpu``.

It finds the GPUs, runs the claims that fit them as real jobs, and prints a table of claims,
measured values and verdicts. ``detect.py`` finds the hardware and decides purely what to run where,
``claims.py`` has the claims, ``programs.py`` what their ranks run, and ``jobs.py`` starts the jobs.
docs/gpu.md describes how to use it.
"""
