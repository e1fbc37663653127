"""What runs beside each rank's program, and what the launcher and it say to each other."""
