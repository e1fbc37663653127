"""Progress reports, timeline and terminal output of a run while it goes on."""
