"""The queue of Kubernetes: jobs that run in pods."""
