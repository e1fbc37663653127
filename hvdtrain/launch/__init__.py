"""Start, watch and stop jobs; no TensorFlow, no MPI."""
