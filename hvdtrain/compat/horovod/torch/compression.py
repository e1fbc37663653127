"""Conversion of tensors to smaller dtypes before they are sent."""

from __future__ import annotations

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Converts a tensor to a smaller dtype before it is reduced, and converts the result back."""

    dtype: torch.dtype | None = None
    """Floating dtype in which tensors are sent. None keeps the tensor's dtype."""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor to send, and a value that ``decompress`` needs."""
        converts = cls.dtype is not None and tensor.dtype.is_floating_point
        return tensor.to(cls.dtype) if converts else tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Convert a tensor back to the dtype that it had before ``compress``."""
        return tensor.to(ctx)


class _Float16(Compressor):
    dtype = torch.float16


class _BFloat16(Compressor):
    dtype = torch.bfloat16


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
