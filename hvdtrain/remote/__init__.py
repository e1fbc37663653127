"""Ways to reach other hosts, and remedies where they can't be reached."""
