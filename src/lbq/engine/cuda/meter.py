"""The energy counter of an NVIDIA card, through its driver's library (NVML)."""

from __future__ import annotations

import ctypes
from typing import Any

from lbq.engine.meters import Meter, NoMeter

LIBRARY = "libnvidia-ml.so.1"


class CardMeter(Meter):
    """The whole card on which PyTorch computes, its memory included."""

    def __init__(self, library: Any = None, uuid: str = "") -> None:
        """library, uuid: of another driver library and card than the machine's own."""
        try:
            self.library = ctypes.CDLL(LIBRARY) if library is None else library
        except OSError as error:
            raise NoMeter(f"no driver library {LIBRARY}, which counts a card's energy") from error
        self._call("nvmlInit_v2")
        self.card = ctypes.c_void_p()
        name = (uuid or _uuid()).encode()
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(name), ctypes.byref(self.card))
        self.first = self._millijoules()
        self.name = "graphics card (NVML)"

    def joules(self) -> float:
        return (self._millijoules() - self.first) / 1e3

    def _millijoules(self) -> int:
        value = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self.card, ctypes.byref(value))
        return value.value

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self.library, function)(*arguments):
            raise NoMeter(f"the card's driver does not tell its energy: {function} gave {code}")


def _uuid() -> str:
    import torch

    if not torch.cuda.is_available():
        raise NoMeter("no GPU that PyTorch can use")
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
