"""The parts of hvdtrain that use PyTorch."""
