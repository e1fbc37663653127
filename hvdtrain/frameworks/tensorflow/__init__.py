"""TensorFlow: collectives in graphs and on devices."""
