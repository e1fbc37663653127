"""Starts, watches and stops jobs. Imports neither TensorFlow nor MPI."""
