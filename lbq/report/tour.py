"""A tour of one image through a deployed network: its pixels, every layer's levels, bit planes, the classes. NumPy only.

Made from the integer engine's trace: what is shown is what the network computed, level by level.
"""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lbq.engine import Network
from lbq.engine.levels import bit_planes
from lbq.report.figures import level_colour

CHANNELS = 12  # that are shown of each layer: the busiest
GAP = [154, 163, 173]


@dataclass(frozen=True)
class Picture:
    """A PNG as a data address. width: of the original, in pixels."""

    address: str
    width: int
    height: int
    text: str


@dataclass(frozen=True)
class Stop:
    """One layer: its busiest channels by timestep, and the bit planes of the busiest at the first timestep."""

    layer: str
    shape: tuple[int, int, int]
    n_max: int
    active: float
    additions: float
    unary: float
    levels: tuple[Picture, ...]
    planes: tuple[Picture, ...]


@dataclass(frozen=True)
class Tour:
    image: tuple[Picture, ...]
    stops: tuple[Stop, ...]
    classes: tuple[tuple[str, float], ...]
    truth: str = ""


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of `[H, W]` grey or `[H, W, 3]` colour."""
    height, width = pixels.shape[:2]
    kind = 2 if pixels.ndim == 3 else 0
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1).tobytes()

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def picture(pixels: NDArray[np.uint8], text: str) -> Picture:
    encoded = base64.b64encode(png(pixels)).decode()
    return Picture(f"data:image/png;base64,{encoded}", pixels.shape[1], pixels.shape[0], text)


def take(net: Network, image: NDArray[np.uint8], truth: str = "") -> Tour:
    """image: uint8 `[C, H, W]`, or `[T, C, H, W]` for an event network."""
    network = net.network
    out = net.run(image, "bitplane", trace=True)
    assert out.levels is not None
    logits = out.logits[0] * out.scale
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    names = network.classes or tuple(map(str, range(len(logits))))
    order = np.argsort(-logits, kind="stable")[:5]
    stops = tuple(_stop(net, name, levels[:, 0]) for name, levels in out.levels.items())
    frames = [image] if network.static else list(image)
    return Tour(
        image=tuple(_pixels(frame, network.input_max, i, len(frames)) for i, frame in enumerate(frames)),
        stops=stops,
        classes=tuple((names[i], float(shares[i])) for i in order),
        truth=truth,
    )


def _pixels(frame: NDArray[np.uint8], brightest: int, i: int, count: int) -> Picture:
    text = "the image" if count == 1 else f"frame {i + 1} of {count}"
    if frame.shape[0] == 3:
        scaled = frame.astype(np.float64) * 255 / brightest
        return picture(scaled.clip(0, 255).astype(np.uint8).transpose(1, 2, 0), text)
    summed = frame.astype(np.float64).sum(0)
    high = brightest if count == 1 else max(float(summed.max()), 1.0)
    return picture((summed * 255 / high).clip(0, 255).astype(np.uint8), text)


def _stop(net: Network, name: str, levels: NDArray[np.integer]) -> Stop:
    """levels: `[T, C, H, W]` of one image."""
    spec = net.network.spec(name)
    magnitude = np.abs(levels.astype(np.int64))
    busiest = np.argsort(-magnitude.sum((0, 2, 3)), kind="stable")[:CHANNELS]
    bits = bit_planes(magnitude, spec.planes)
    palette = _palette(spec.n_max)
    shown = tuple(
        picture(palette[_mosaic(step[busiest])], f"levels of {len(busiest)} channels of {name} at timestep {t + 1}")
        for t, step in enumerate(magnitude)
    )
    inked = np.array([[255] * 3, [0] * 3, GAP], np.uint8)
    planes = tuple(
        picture(inked[_mosaic(bits[k, 0][busiest])], f"plane {k} of {name}, worth {2**k}")
        for k in reversed(range(spec.planes))
    )
    return Stop(
        layer=name,
        shape=net.network[name].shape,
        n_max=spec.n_max,
        active=float((magnitude != 0).mean()),
        additions=float(bits.sum() / magnitude.size),
        unary=float(magnitude.mean()),
        levels=shown,
        planes=planes,
    )


def _palette(n_max: int) -> NDArray[np.uint8]:
    """Colour of every level, silence nearly white; the last is of the gap between channels."""
    colours = ["#f4f4f4", *(level_colour(k, n_max) for k in range(1, n_max + 1))]
    return np.array([*([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours), GAP], np.uint8)


def _mosaic(channels: NDArray[np.integer] | NDArray[np.bool_]) -> NDArray[np.int64]:
    """Channels `[C, H, W]` side by side, at most six to a row, and -1 (a palette's last colour) between them."""
    count, height, width = channels.shape
    columns = min(count, 6)
    rows = -(-count // columns)
    out = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1), -1, np.int64)
    for i, channel in enumerate(channels):
        y, x = divmod(i, columns)
        out[y * (height + 1) : y * (height + 1) + height, x * (width + 1) : x * (width + 1) + width] = channel
    return out
