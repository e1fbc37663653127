"""Training through parameter servers: what ``fit`` is on workers, and on servers."""
