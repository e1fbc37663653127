"""Conversion of tensors to smaller dtypes before they are sent."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Converts a tensor to a smaller dtype before it is reduced, and converts the result back."""

    dtype: tf.DType | None = None
    """Floating dtype in which tensors are sent. None keeps the tensor's dtype."""

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Return the tensor to send, and a value that ``decompress`` needs."""
        dtype = cls.dtype if cls.dtype is not None and tensor.dtype.is_floating else tensor.dtype
        return tf.cast(tensor, dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """Convert a tensor back to the dtype that it had before ``compress``."""
        return tf.cast(tensor, ctx)


class _Float16(Compressor):
    dtype = tf.float16


class _BFloat16(Compressor):
    dtype = tf.bfloat16


class Compression:
    """The compressors that can be passed as ``compression``.

    Attributes:
        none: No conversion.
        fp16: Send floating-point tensors as float16, whose largest value is 65504.
        bf16: Send floating-point tensors as bfloat16, which has the range of float32 and 8 bits of
            precision.
    """

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
