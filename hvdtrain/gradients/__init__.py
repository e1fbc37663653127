"""From the gradients of one rank to their averages over all ranks, in TensorFlow's graphs."""
