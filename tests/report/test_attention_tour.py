"""The tour of a network with attention: which token attends to which."""

from __future__ import annotations

import base64
import io
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lbq.deploy import deploy
from lbq.models import attention, over_time
from lbq.neuron import BurstNeuron
from lbq.report.page import _tour
from lbq.report.tour import LINE, level_pixel, take
from tests.support.small_nets import Functional, pixels


@pytest.mark.parametrize("scored", [False, True])
def test_each_token_has_a_map_of_what_it_attends_to(scored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its place, in the colours of levels, or of shares of the largest score. Q is a gate, whose levels are no layer's."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.conv, timesteps=2))  # 4 x 2 tokens
        if scored:
            z = attention.weigh(m.scorer(attention.scores(y * y, y, 2, 0.5)), y, 1.0)
        else:
            z = attention.attend(y * y, y, y, 2, 1.0)
        return m.fc(m.out(z).mean((-2, -1))).mean(0)

    torch.manual_seed(0)
    neurons = {name: BurstNeuron() for name in ("sn", "scorer", "out")}
    own = Functional(forward, 2, conv=nn.Conv2d(3, 4, 4, 4), **neurons, fc=nn.Linear(4, 3))
    net, image = deploy(own, (3, 16, 8), mean=[0.5] * 3, std=[0.2] * 3), pixels(3, 16, 8)
    tour = take(net, image)
    ((stop, shown),) = [(stop, a) for stop in tour.stops for a in stop.attention]
    assert stop.layer == ("scorer" if scored else "out")
    levels = net.run(image, "dense", trace=True).levels
    assert levels is not None
    y = levels["sn"][:, 0].reshape(2, 2, 2, 8).astype(int)
    scores = levels["scorer"][:, 0].astype(int) if scored else np.einsum("thdn,thdm->thnm", y * y, y)
    t = int(scores.sum((1, 2, 3)).argmax())
    most = int(scores[t].max())
    assert most > 1
    assert (shown.timestep, shown.count, shown.grid) == (t + 1, 2, (4, 2))
    assert (list(shown.heads), shown.levels, shown.most) == ([1, 2], scored, most)
    shades = 5 if scored else min(most, 12)
    colours = ["#ffffff", *(level_pixel(k, shades) for k in range(1, shades + 1))]
    for head, picture in shown.heads.items():
        with Image.open(io.BytesIO(base64.b64decode(picture.address.split(",", 1)[1])), formats=["PNG"]) as drawn:
            pixels_drawn = np.asarray(drawn)
        for query, key in product(range(8), range(8)):
            places = zip(divmod(query, 2), divmod(key, 2), (4, 2), strict=True)
            y_at, x_at = (a * (size * picture.scale + LINE) + b * picture.scale for a, b, size in places)
            value = int(scores[t, head - 1, query, key])
            colour = "#" + "".join(f"{part:02x}" for part in pixels_drawn[y_at, x_at])
            assert colour == colours[value if scored else -(-value * shades // most)]
    page = _tour(tour)
    assert f"Which token attends to which, in each head at t = {t + 1}. Tokens are 4 × 2 places of the image." in page
    assert ("levels, in the colours above" in page) == scored
    monkeypatch.setattr("lbq.report.tour.MOST_HEADS", 1)
    assert "in the 1 busiest of 2 heads" in _tour(take(net, image))
    monkeypatch.setattr("lbq.report.tour.MOST_TOKENS", 7)
    assert "attends" not in _tour(take(net, image))
