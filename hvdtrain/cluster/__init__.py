"""Who and where this process is: pure functions and frozen values, no TensorFlow, no MPI."""
