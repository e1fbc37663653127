"""Progress reports, timeline and terminal output during training."""
