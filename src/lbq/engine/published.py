"""Networks by name: those that come with lbq, and those in the folder that LBQ_MODELS names. Nothing is fetched. No torch."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from lbq.errors import ArtefactError, nearest
from lbq.system import files

FILE, CONFIG = "model.lbq", "config.json"  # in a folder that `lbq models export` wrote; a run folder has no config.json
INSTALLED = Path(__file__).parent / "published"  # which setup.py fills
CHECKOUT = Path(__file__).parents[3] / "models"


def folders() -> list[Path]:
    """Where networks with a name lie, the reader's own first."""
    own = os.environ.get("LBQ_MODELS")
    if own and not Path(own).is_dir():
        raise ArtefactError(f"LBQ_MODELS names {own}, which is not a folder: give a folder of model files, or unset it")
    clone = [CHECKOUT] if (CHECKOUT.parent / "pyproject.toml").is_file() else []
    return [folder for folder in (*([Path(own)] if own else []), INSTALLED, *clone) if folder.is_dir()]


def names() -> dict[str, Path]:
    """The file of every network with a name. A name is its file's, without the suffix."""
    known: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.lbq")):
            known.setdefault(path.stem, path)
    return known


def is_name(text: Path | str) -> bool:
    """Whether this can only be a network's name: no such file or folder exists, and it is one word or a known name."""
    word = re.fullmatch(r"[\w-]+", str(text)) is not None
    return not Path(text).exists() and (word or str(text) in names())


def is_deployed(path: Path) -> bool:
    """Whether this stands for a deployed network, where a run folder may be given too."""
    return (
        path.is_file()
        or all((path / name).is_file() for name in (CONFIG, FILE))
        or (is_name(path) and path.name in names())
    )


def resolve(name_or_path: Path | str) -> Path:
    """The file of a network: `name_or_path` is a name of `lbq models`, a file, or a folder for a hub."""
    path = files.path_of(
        name_or_path, "name_or_path", "give a file, as lbq.engine.save writes it, or a name of lbq models"
    )
    if path.is_dir():
        if (path / "config.toml").is_file() and not (path / CONFIG).is_file():
            inside = (path / FILE).is_file()
            command = shlex.join(["lbq", "deploy", str(path), "-o", FILE])
            instead = f"give {path / FILE}" if inside else f"deploy it first, `{command}`"
            raise ArtefactError(f"{path} is a run folder, not a deployed network: {instead}")
        if missing := [name for name in (CONFIG, FILE) if not (path / name).is_file()]:
            raise ArtefactError(
                f"{path} is not a file, and as a folder for a hub it lacks {missing[0]}: give a model.lbq that `lbq deploy` "
                "wrote, or a folder that `lbq models export` wrote"
            )
        return path / FILE
    if not is_name(name_or_path):
        return path
    known = names()
    if path.name not in known:
        raise ArtefactError(
            f"{path} is neither a file nor a network that `lbq models` lists{nearest(path.name, known)}"
        )
    return known[path.name]


def card_of(path: Path | str) -> str | None:
    """What README.md beside a network's file says of it: the section under the file's name. None where there is none."""
    path = Path(path)
    readme = path.parent / "README.md"
    if not readme.is_file():
        return None
    sections = re.split(r"^## `([^`\n]+)`\n", readme.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True)).get(path.name)


def accuracy_of(card: str | None) -> float | None:
    """The test accuracy, in percent, in a card's row `accuracy, integer`."""
    row = re.search(r"^\| accuracy, integer \| (\d+(?:\.\d+)?) %", card or "", re.MULTILINE)
    return float(row[1]) if row else None
