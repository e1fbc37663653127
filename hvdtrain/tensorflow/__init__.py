"""Collectives inside TensorFlow's graphs."""
