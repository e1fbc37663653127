"""Input that is read with ``tf.data``: arrays on the TensorFlow backend, and users' pipelines."""
