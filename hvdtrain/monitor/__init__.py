"""Progress reports, timeline, and terminal output of a running training."""
