"""``fit`` in jobs with parameter servers, on the workers and on the servers."""
