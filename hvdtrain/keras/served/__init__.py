"""Training with parameter servers: ``fit`` on workers and on servers."""
