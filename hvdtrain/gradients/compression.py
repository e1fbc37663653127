"""Smaller types in which tensors travel."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["Compression", "Compressor"]


class Compressor:
    """The cast of a tensor to a smaller type before it is reduced, and back afterwards."""

    dtype: tf.DType | None = None
    """The floating type to travel in; None for the tensor's own."""

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """The tensor that travels, and what ``decompress`` needs to know."""
        travels = cls.dtype if cls.dtype is not None and tensor.dtype.is_floating else tensor.dtype
        return tf.cast(tensor, travels), tensor.dtype

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """The tensor in the type that it had before ``compress``."""
        return tf.cast(tensor, ctx)


class _Float16(Compressor):
    dtype = tf.float16


class _BFloat16(Compressor):
    dtype = tf.bfloat16


class Compression:
    """The compressors that can be passed as ``compression``.

    Attributes:
        none: Tensors travel as they are.
        fp16: Floating tensors travel as float16, which holds numbers up to 65504.
        bf16: Floating tensors travel as bfloat16: the range of float32, with 8 bits of precision.
    """

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
