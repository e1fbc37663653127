"""Access to other hosts: probes, their problems, and remedies."""
