"""Ranks that hold a model's variables and apply the gradients that others send."""
