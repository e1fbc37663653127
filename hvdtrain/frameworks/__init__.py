"""What hvdtrain needs of the framework that computes: TensorFlow or PyTorch."""
