"""What the site takes from outside docs/: results, clusters, notebooks, sources and the settings.

Hooks of mkdocs (`mkdocs.yml`). The pages in docs/ link to files of the repository as they lie
there; every file that is linked becomes a page or a file of the site, so a link that leads nowhere
fails the strict build.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from treeprop_ray.__main__ import COMMANDS
from treeprop_ray.config import Settings, describe

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
NOTEBOOKS = "examples/howto"
KINDS = {".py": "python", ".yaml": "yaml", ".json": "json", "": "make"}


def on_files(files: Files, config: Any) -> Files:
    """Add what docs/ does not hold."""
    for path in published():
        name = str(path.relative_to(ROOT))
        if path.suffix == ".md":
            files.append(File.generated(config, address(name), content=path.read_text()))
        else:
            files.append(File.generated(config, address(name), abs_src_path=str(path)))
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        files.append(File.generated(config, f"howto/{path.stem}.md", content=from_notebook(path)))
    files.append(File.generated(config, "settings.md", content=settings_page()))
    for name in sorted(linked(files)):
        page = source_page(ROOT / name)
        files.append(File.generated(config, address(name), content=page))
    return files


def published() -> Iterator[Path]:
    """Results and the clusters' guide, with the files beside them."""
    for folder in ("results", "clusters"):
        for path in sorted((ROOT / folder).rglob("*")):
            inner = path.relative_to(ROOT).parts[1]
            if path.is_file() and inner not in ("runs", "local"):
                yield path


def address(name: str) -> str:
    """Where a file of the repository lies in the site."""
    if name.startswith("docs/") and not name.endswith(".py"):
        return name.removeprefix("docs/")
    if name == "README.md":
        return "index.md"
    if name.startswith(("results/", "clusters/")):
        return name.replace("README.md", "index.md")
    if name.startswith(NOTEBOOKS):
        return f"howto/{Path(name).stem}.md"
    return f"source/{name}.md"


def home(uri: str) -> str:
    """The folder in the repository that a page's links start from."""
    if uri.startswith(("results/", "clusters/")):
        return posixpath.dirname(uri)
    return NOTEBOOKS if uri.startswith("howto/") else posixpath.join("docs", posixpath.dirname(uri))


def target(uri: str, link: str) -> str:
    """The file of the repository that a link of a page means; empty for one that is no file."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return ""
    name = posixpath.normpath(posixpath.join(home(uri), link))
    return name if (ROOT / name).exists() else ""


def linked(files: Files) -> set[str]:
    """Sources that pages link to."""
    names = set()
    for file in files.documentation_pages():
        for _, link, _ in LINK.findall(file.content_string):
            name = target(file.src_uri, link)
            if name and address(name).startswith("source/"):
                names.add(name)
    return names


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as in the repository become links of the site."""
    uri = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        name = target(uri, match[2])
        if not name:
            return match[0]
        there = posixpath.relpath(address(name), posixpath.dirname(uri) or ".")
        return f"{match[1]}{there}{match[3]}"

    return LINK.sub(moved, markdown)


def source_page(path: Path) -> str:
    """A file as a page, or the list of a folder's files."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        return "\n".join([f"# {name}", "", *(f"- `{p.name}`" for p in sorted(path.iterdir()))])
    if path.suffix == ".md":
        return f"````text\n{path.read_text()}\n````\n"
    return f"# {name}\n\n````{KINDS.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def from_notebook(path: Path) -> str:
    """The cells of a notebook as a page."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    parts.append(f"This page is a notebook that a test runs: `{path.relative_to(ROOT)}`.")
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """Every key of every command with its default, its meaning and what it takes."""
    lines = [
        "# Settings",
        "",
        "Every command takes `key=value` words. This page is written from the code; `--help` prints"
        " the same, with the values that apply after `experiment=…`. Defaults are overridden by the"
        " experiment, and the experiment by the words of the command. An unknown key is an error.",
        "",
    ]
    own = {key for _, rows in describe(Settings()) for key, _, _ in rows}
    for command in COMMANDS:
        module = import_module(f"treeprop_ray.{command}")
        names = {name.lower(): thing for name, thing in vars(module).items()}
        schema = names.get(f"{command}settings", Settings)
        groups = describe(schema())
        if issubclass(schema, Settings) and schema is not Settings:  # those of train, and its own
            groups = [(title, [r for r in rows if r[0] not in own]) for title, rows in groups]
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        lines += [f"## {command}", "", summary, ""]
        for title, rows in groups:
            if rows:
                lines += [f"### {title}", ""] if len(groups) > 1 else []
                lines += ["| key | default | meaning |", "|---|---|---|"]
                lines += [f"| `{k}` | {code(v)} | {escaped(text)} |" for k, v, text in rows]
                lines.append("")
    return "\n".join(lines)


def code(value: str) -> str:
    """A value in a cell."""
    return f"`{value}`" if value else ""


def escaped(text: str) -> str:
    """A text in a cell, as it stands."""
    return re.sub(r"([|<>*_\[\]])", r"\\\1", text)
