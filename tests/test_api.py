"""What the package offers is documented and shown."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import treeprop_ray

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def test_the_page_has_every_public_name_from_where_it_is_defined() -> None:
    """mkdocstrings writes signatures and docstrings from the code; the page names what to show."""
    named = re.findall(r"^::: (\S+)\.(\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(name for _, name in named) == sorted(treeprop_ray.__all__)
    for module, name in named:
        assert getattr(treeprop_ray, name).__module__ == module


def test_every_public_name_has_a_docstring_and_is_shown_by_dir() -> None:
    assert set(dir(treeprop_ray)) == {*treeprop_ray.__all__, "__version__"}
    for name in treeprop_ray.__all__:
        assert inspect.cleandoc(getattr(treeprop_ray, name).__doc__ or ""), name
