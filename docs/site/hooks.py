"""What the documentation site does beyond Markdown.

- The home page is README.md.
- The notebooks are part of the site, as files to download.
- One rule for links that leave docs/, such as `../../models/README.md`. On a forge they work as they are. In the site they
  lead to `extra.repository` where it is set, and to the checkout in which the site was built elsewhere.
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
