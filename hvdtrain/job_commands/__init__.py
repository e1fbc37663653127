"""What people do with jobs from the command line."""
