"""A tour of one image through a deployed network, from the integer engine's trace: pixels, levels, bit planes, classes."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine import Network
from lbq.graph import Synapse
from lbq.graph.levels import bit_planes, gated, synapse_product
from lbq.report.theme import LIGHT, shade

CHANNELS_PER_LAYER = 12  # the busiest
LIKELIEST_CLASSES = 5
SILENT, LINE_COLOUR = "#ffffff", "#9aa3ad"  # level 0, and the lines between channels
LINE = 2  # width of those lines in pixels
IMAGE_PIXELS, LEVELS_PIXELS, PLANES_PIXELS, HEAD_PIXELS = 192, 420, 240, 280  # the largest side of a picture
MOST_HEADS, MOST_TOKENS = 6, 256  # of attention: the busiest heads; more tokens are not drawn
SCORE_COLOURS = 12  # of scores, which count far higher than levels


@dataclass(frozen=True)
class Picture:
    """A PNG as a data address. scale: side of one pixel of the image or map, in pixels of the picture."""

    address: str
    width: int
    height: int
    text: str
    scale: int


@dataclass(frozen=True)
class Attention:
    """Which token attends to which, at the busiest timestep: by head, for each token its scores with all tokens.

    heads: pictures of the busiest, by number: a small map for each token at its place on the grid (height, width). levels:
    whether scores are the levels of a neuron, and not sums. most: the largest score.
    """

    heads: dict[int, Picture]
    count: int
    grid: tuple[int, int]
    timestep: int
    levels: bool
    most: int


@dataclass(frozen=True)
class Stop:
    """One layer: its busiest channels at each timestep, and their bit planes at the first; and where a product of Q and K leads
    to it, who attends to whom."""

    layer: str
    shape: tuple[int, int, int]
    n_max: int
    active: float
    additions: float
    unary: float
    levels: tuple[Picture, ...]
    planes: tuple[Picture, ...]
    attention: tuple[Attention, ...] = ()


@dataclass(frozen=True)
class Tour:
    """about: the image and the network, in words."""

    image: tuple[Picture, ...]
    stops: tuple[Stop, ...]
    classes: tuple[tuple[str, float], ...]
    about: str = ""


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of `[H, W]` grey or `[H, W, 3]` colour."""
    height, width = pixels.shape[:2]
    kind = 2 if pixels.ndim == 3 else 0
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1).tobytes()

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def picture(pixels: NDArray[np.uint8], text: str, scale: int) -> Picture:
    encoded = base64.b64encode(png(pixels)).decode()
    return Picture(f"data:image/png;base64,{encoded}", pixels.shape[1], pixels.shape[0], text, scale)


def take(net: Network, image: NDArray[np.uint8], about: str = "") -> Tour:
    """image: uint8 `[C, H, W]`, or `[T, C, H, W]` for an event network."""
    network = net.network
    out = net.run(image, "bitplane", trace=True)
    assert out.levels is not None
    levels = {name: level[:, 0].astype(np.int64) for name, level in out.levels.items()}
    for gate in network.gates:
        levels[gate.name] = gated(levels[gate.factor], levels[gate.source])
    frames = [image] if network.static else list(image)
    return Tour(
        image=tuple(_pixels(frame, network.input_max, i, len(frames)) for i, frame in enumerate(frames)),
        stops=tuple(_stop(net, layer.name, levels) for layer in network.layers),
        classes=tuple((entry["class"], entry["share"]) for entry in out.ranked(network.classes)[:LIKELIEST_CLASSES]),
        about=about,
    )


def _pixels(frame: NDArray[np.uint8], brightest: int, i: int, count: int) -> Picture:
    text = "the image" if count == 1 else f"frame {i + 1} of {count}"
    scale = max(IMAGE_PIXELS // max(frame.shape[1:]), 1)
    values = frame.astype(np.float64)
    if len(frame) == 3:
        shown = values.transpose(1, 2, 0) * 255 / brightest
    else:
        summed = values.sum(0)
        shown = summed * 255 / (brightest if count == 1 else max(float(summed.max()), 1.0))
    return picture(_enlarged(shown.clip(0, 255).astype(np.uint8), scale), text, scale)


def _enlarged(pixels: NDArray[Any], scale: int) -> NDArray[Any]:
    return pixels.repeat(scale, 0).repeat(scale, 1)


def _stop(net: Network, name: str, levels: Mapping[str, NDArray[np.int64]]) -> Stop:
    """levels: of all layers and gates, `[T, C, H, W]` of one image."""
    spec = net.network.spec(name)
    magnitude = np.abs(levels[name])
    busiest = np.argsort(-magnitude.sum((0, 2, 3)), kind="stable")[:CHANNELS_PER_LAYER]
    bits = bit_planes(magnitude, spec.planes)
    palette = _palette(SILENT, *(level_pixel(k, spec.n_max) for k in range(1, spec.n_max + 1)))
    pictures = tuple(
        _mosaic(
            step[busiest], palette, LEVELS_PIXELS, f"levels of {len(busiest)} channels of {name} at timestep {t + 1}"
        )
        for t, step in enumerate(magnitude)
    )
    inked = _palette("#ffffff", "#000000")
    planes = tuple(
        _mosaic(bits[k, 0][busiest], inked, PLANES_PIXELS, f"plane {k} of {name}, worth {2**k}")
        for k in reversed(range(spec.planes))
    )
    return Stop(
        layer=name,
        shape=net.network[name].shape,
        n_max=spec.n_max,
        active=float((magnitude != 0).mean()),
        additions=float(bits.sum() / magnitude.size),
        unary=float(magnitude.mean()),
        levels=pictures,
        planes=planes,
        attention=tuple(
            _attention(s, levels, None if s.values else magnitude, palette)
            for s in net.network[name].matmuls
            if s.keys and s.tokens <= MOST_TOKENS
        ),
    )


def _attention(
    synapse: Synapse,
    levels: Mapping[str, NDArray[np.int64]],
    emitted: NDArray[np.int64] | None,
    palette: NDArray[np.uint8],
) -> Attention:
    """emitted: levels `[T, heads, queries, keys]` of a neuron on the scores, in the colours of `palette`. None: sums."""
    scores = emitted
    if scores is None:
        square = replace(synapse, values="", out_shape=(synapse.heads, synapse.tokens, synapse.tokens))
        scores = np.abs(synapse_product(square, [levels[source] for source in square.sources]))
    t = int(scores.sum((1, 2, 3)).argmax())
    most = int(scores[t].max())
    colours = min(most, SCORE_COLOURS)
    shown = scores[t]
    if emitted is None:
        palette = _palette(SILENT, *(level_pixel(k, colours) for k in range(1, colours + 1)))
        shown = -(-shown * colours // max(most, 1))
    busiest = sorted(np.argsort(-shown.sum((1, 2)), kind="stable")[:MOST_HEADS])
    grid = synapse.in_shape[1:]
    pictures = {}
    for head in map(int, busiest):
        text = f"{synapse.name} of head {head + 1} at t = {t + 1}"
        pictures[head + 1] = _mosaic(shown[head].reshape(-1, *grid), palette, HEAD_PIXELS, text, grid[1])
    return Attention(pictures, synapse.heads, grid, t + 1, emitted is not None, most)


def level_pixel(k: int, n_max: int) -> str:
    """The colour of level k = 1..n_max in a picture, whose ground is white in either theme."""
    return LIGHT[shade(k, n_max)]


def _palette(*colours: str) -> NDArray[np.uint8]:
    """Colours by number; the last is for the lines between channels."""
    return np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (*colours, LINE_COLOUR)], np.uint8)


def _mosaic(
    channels: NDArray[np.integer] | NDArray[np.bool_],
    palette: NDArray[np.uint8],
    largest: int,
    text: str,
    most: int = 6,
) -> Picture:
    """Channels `[C, H, W]` side by side, at most so many to a row, enlarged by a whole number, with even lines between them."""
    count, height, width = channels.shape
    columns = min(count, most)
    rows = -(-count // columns)
    scale = max(min((largest // columns - LINE) // width, (largest // rows - LINE) // height), 1)
    high, wide = height * scale + LINE, width * scale + LINE
    out = np.full((rows * high - LINE, columns * wide - LINE), -1, np.int64)  # the palette's last colour
    for i, channel in enumerate(channels):
        y, x = i // columns * high, i % columns * wide
        out[y : y + high - LINE, x : x + wide - LINE] = _enlarged(channel, scale)
    return picture(palette[out], text, scale)
