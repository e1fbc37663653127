"""Computing a rank's batch: on one device, or on several, a part of the batch on each."""

from hvdtrain.keras.compute.interface import Compute
from hvdtrain.keras.compute.one_device import OneDevice
from hvdtrain.keras.compute.towers import Towers

__all__ = ["Compute", "OneDevice", "Towers"]
