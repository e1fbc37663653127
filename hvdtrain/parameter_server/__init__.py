"""Parameter servers: ranks that hold variables and apply the gradients of workers."""
