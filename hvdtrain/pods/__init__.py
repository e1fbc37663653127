"""Programs that run in the pods of a job, and how they and the client ask a cluster."""
