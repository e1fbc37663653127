"""The agent of each rank, and the messages between agent and launcher."""
