"""The agent of each rank, and its messages to and from the launcher."""
