"""Jobs: their folders with specification, state, events, metrics and log, and their queues."""
