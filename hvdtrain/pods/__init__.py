"""Programs that run in the pods of a job, and the API of their cluster."""
