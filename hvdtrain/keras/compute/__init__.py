"""Computation of a rank's batch, on one device or on several devices."""

from hvdtrain.keras.compute.one_device import OneDevice
from hvdtrain.keras.compute.towers import Towers

__all__ = ["Compute", "OneDevice", "Towers"]

Compute = OneDevice | Towers
