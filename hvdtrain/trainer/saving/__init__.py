"""Checkpoints of ``fit``: their content, when they are taken, and how training resumes."""
