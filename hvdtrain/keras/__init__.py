"""Keras models on several ranks; needs TensorFlow, and is loaded when first used."""
