"""Checkpoints of a running ``fit``: what they hold, when they are taken, how training resumes."""
