"""What the documentation site does beyond Markdown.

- The home page is README.md.
- The notebooks are part of the site, as files to download.
- One rule for links that leave docs/, such as `../../models/README.md`. On a forge they work as they are. In the site they
  lead to `extra.repository` where it is set, and to the checkout in which the site was built elsewhere.
- Cells of tables say how long they are, so that numbers are not broken and prose gets room on a phone. Names in code break
  at dots and underscores alone.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
CELL = re.compile(r"<(t[dh])>(.*?)</\1>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
SHORT, LONG, WORD = 18, 60, 24  # letters of a cell without breaks, of one with prose, of a word without breaks
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as the home page, and the notebooks."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.name}", abs_src_path=str(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Resolve the links of a page; code stays as it is. The home page has no pages beside it to list."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else resolve(part, page.file, config, files) for i, part in enumerate(parts))


def resolve(text: str, file: File, config: Any, files: Files) -> str:
    """Turn every relative link into one that works in the site."""
    source = "README.md" if file.src_uri == "index.md" else f"docs/{file.src_uri}"  # its place in the repository

    def replaced(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = place.removeprefix("docs/")  # notebooks/ has the same name in the site
        if place.startswith(("docs/", "notebooks/")) and files.get_file_from_path(inside) is not None:
            relative = posixpath.relpath(inside, posixpath.dirname(file.src_uri) or ".")
            return f"{image}[{label}]({relative}{hash_}{anchor})"
        if not (ROOT / place).exists():
            return link[0]  # mkdocs says what is wrong with it
        return f'<a href="{html.escape(address(place, file, config) + hash_ + anchor)}">{label}</a>'

    return LINK.sub(replaced, text)


def address(place: str, file: File, config: Any) -> str:
    """Where a file of the repository is found from a page of the site."""
    repository = config["extra"].get("repository") or ""
    if repository:
        return f"{repository.rstrip('/')}/{place}"
    page = posixpath.dirname((Path(config["site_dir"]) / file.dest_uri).as_posix())
    return posixpath.relpath((ROOT / place).as_posix(), page)


def on_post_page(output: str, **_: Any) -> str:
    """Mark the cells of tables."""
    return CELL.sub(marked, output)


def marked(cell: re.Match[str]) -> str:
    """A cell with its class, and with places where its code may break."""
    kind, inside = cell.groups()
    length = len(html.unescape(re.sub(r"<[^>]+>", "", inside)))
    inside = CODE.sub(lambda code: " ".join(map(breakable, code[0].split(" "))), inside)
    name = "short" if length <= SHORT else "long" if length > LONG else ""
    return f'<{kind} class="{name}">{inside}</{kind}>' if name else f"<{kind}>{inside}</{kind}>"


def breakable(word: str) -> str:
    """A long name may break after its dots, slashes and underscores."""
    return word if len(word) <= WORD else re.sub(r"([._/=])(?=[^._/=])", r"\1<wbr>", word)
