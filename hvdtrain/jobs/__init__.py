"""Job folders, which contain the specification, state, metrics and log of a job, and job queues."""
