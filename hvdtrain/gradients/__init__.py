"""Averaging of gradients over all ranks, in eager mode or in TensorFlow graphs."""
