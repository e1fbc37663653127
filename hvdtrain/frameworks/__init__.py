"""The functions that hvdtrain needs from the framework of the program: TensorFlow or PyTorch."""
