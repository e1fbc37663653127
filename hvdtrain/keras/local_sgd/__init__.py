"""Local SGD: each rank makes steps of its own, and now and then all average their weights."""
