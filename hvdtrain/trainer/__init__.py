"""``hvdtrain.distribute``: the training of a Keras model on all ranks together."""
