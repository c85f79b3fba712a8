"""Is the normalisation that a deployment is given that of training? A few images and their tensors say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lbq.errors import GraphError
from lbq.graph import Array

Like = tuple[NDArray[np.uint8], Any]  # a few images as stored, and the tensors that the network was trained on


def check_like(like: Any, mean: Sequence[float], std: Sequence[float], scale: int) -> None:
    """Refuse (pixel / scale - mean) / std if it is not what made the tensors of the images, to half a pixel's brightness."""
    pixels, tensors = _pair(like, len(mean))
    column = [-1, *[1] * (pixels.ndim - 2)]
    deviations = np.reshape(std, column)
    expected = (pixels / scale - np.reshape(mean, column)) / deviations
    if (np.abs(expected - tensors) <= 0.5 / (scale * deviations)).all():
        return
    given = f"{_normalisation(mean, std)}, scale={scale} do not give the tensors of `like`"
    slopes, offsets = _fit(pixels, tensors)
    if slopes is None or (np.abs(slopes * pixels + offsets - tensors) > 0.5 * slopes).any():
        raise GraphError(
            f"{given}, nor does any other: give the tensors of the same images, in order and not augmented"
        )
    std_then = 1 / (slopes.ravel() * scale)
    raise GraphError(f"{given}: in training it was {_normalisation(-offsets.ravel() * std_then, std_then)}")


def _pair(like: Any, channels: int) -> tuple[Array, Array]:
    """Both as float64 `[B, C, ...]`."""
    try:
        images, tensors = like
        pixels, values = np.asarray(images), torch.as_tensor(tensors).detach().cpu().double().numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise GraphError("like must be two things: uint8 images, and the tensors made of them for training") from error
    if pixels.dtype != np.uint8 or pixels.ndim < 2 or pixels.shape[1] != channels or pixels.shape != values.shape:
        raise GraphError(
            f"like must be uint8 images [B, {channels}, ...] and tensors of the same shape, got {pixels.dtype} "
            f"{list(pixels.shape)} and {list(values.shape)}"
        )
    return pixels.astype(np.float64), values


def _fit(pixels: Array, tensors: Array) -> tuple[Array | None, Array]:
    """The slope and offset of each channel by least squares; None if a channel does not grow with its pixels."""
    over = (0, *range(2, pixels.ndim))
    centres, means = pixels.mean(over, keepdims=True), tensors.mean(over, keepdims=True)
    spread = ((pixels - centres) ** 2).mean(over, keepdims=True)
    slopes = ((pixels - centres) * (tensors - means)).mean(over, keepdims=True) / np.where(spread, spread, np.inf)
    return (slopes if (slopes > 0).all() else None), means - slopes * centres


def _normalisation(mean: Any, std: Any) -> str:
    return ", ".join(
        f"{name}=[{', '.join(f'{v:.4g}' for v in values)}]" for name, values in (("mean", mean), ("std", std))
    )
