"""Averaging of gradients over ranks, eagerly or in TensorFlow graphs."""
