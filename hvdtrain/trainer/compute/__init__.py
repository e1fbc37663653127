"""Computation of a rank's batch, on one device or on several devices."""

from hvdtrain.trainer.compute.one_device import OneDevice
from hvdtrain.trainer.compute.towers import Towers

__all__ = ["Compute", "OneDevice", "Towers"]

Compute = OneDevice | Towers
