"""The agent beside each rank's program, and the messages between it and the launcher."""
