"""The Kubernetes queue: jobs that run in pods."""
