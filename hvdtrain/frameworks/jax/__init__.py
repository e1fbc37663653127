"""The parts of hvdtrain that use JAX."""
