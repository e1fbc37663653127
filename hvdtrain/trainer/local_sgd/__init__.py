"""Local SGD: ranks train independently and average their weights periodically."""
