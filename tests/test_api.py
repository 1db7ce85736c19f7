"""docs/api.md says what the package offers; `python tests/test_api.py` writes it anew."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import treeprop_ray

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
INTRO = """# The public API

What `from treeprop_ray import …` offers. All else is internal and may change. Written from the code
by `python tests/test_api.py`; a test compares the two.
"""


class Bare(str):
    """An annotation without quotation marks."""

    __repr__ = str.__str__


def signature(name: str, thing: Any) -> str:
    said = inspect.signature(thing)
    given = [p for p in said.parameters.values() if p.name not in ("self", "cls")]
    kept = [p.replace(annotation=Bare(p.annotation)) for p in given]
    back = inspect.Signature.empty if inspect.isclass(thing) else Bare(said.return_annotation)
    text = f"{name}{inspect.Signature(kept, return_annotation=back)}"
    if len(text) <= 100:
        return text
    head, _, tail = text.rpartition(")")
    for p in kept:
        head = head.replace(f" {p}", f"\n    {p}").replace(f"({p}", f"(\n    {p}")
    return f"{head.replace(' *,', chr(10) + '    *,')},\n){tail}"


def entry(name: str, thing: Any, level: str) -> Iterator[str]:
    yield f"{level} {name}\n"
    yield f"```python\n{signature(name, thing)}\n```\n"
    yield f"{inspect.cleandoc(thing.__doc__ or '')}\n"


def members(thing: type) -> dict[str, Any]:
    """Of the class and of those of this package that it extends."""
    own = [c for c in reversed(thing.__mro__) if c.__module__.startswith("treeprop_ray")]
    return {key: member for c in own for key, member in vars(c).items()}


def page() -> str:
    parts = [INTRO]
    for name in treeprop_ray.__all__:
        thing = getattr(treeprop_ray, name)
        parts += entry(name, thing, "##")
        if not inspect.isclass(thing):
            continue
        if dataclasses.is_dataclass(thing):
            fields = ", ".join(f"`{f.name}`" for f in dataclasses.fields(thing))
            parts.append(f"Fields: {fields}.\n")
        for key, member in members(thing).items():
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            if inspect.isfunction(member) and not key.startswith("_") and member.__doc__:
                parts += entry(f"{name}.{key}", member, "###")
    return "\n".join(parts)


def test_the_page_says_what_the_code_offers() -> None:
    assert PAGE.read_text() == page(), "python tests/test_api.py writes the page anew"


def test_every_public_name_has_a_docstring_and_is_shown_by_dir() -> None:
    assert set(dir(treeprop_ray)) == {*treeprop_ray.__all__, "__version__"}
    for name in treeprop_ray.__all__:
        assert textwrap.dedent(getattr(treeprop_ray, name).__doc__ or "").strip(), name


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
