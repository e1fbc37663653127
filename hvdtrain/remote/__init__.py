"""How other hosts are reached, and what to do where they are not."""
