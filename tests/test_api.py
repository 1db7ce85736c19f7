"""What the package offers is documented and shown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import treeprop_ray
from treeprop_ray.run.trainer import Trainer

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def test_the_page_has_every_public_name_from_where_it_is_defined() -> None:
    """mkdocstrings writes signatures and docstrings from the code; the page names what to show."""
    named = re.findall(r"^::: (\S+)\.(\w+)$", PAGE.read_text(), re.MULTILINE)
    named.remove((Trainer.__module__, "Trainer"))  # what callbacks get
    assert sorted(name for _, name in named) == sorted(treeprop_ray.__all__)
    for module, name in named:
        assert getattr(treeprop_ray, name).__module__ == module


def test_every_public_name_has_a_docstring_and_is_shown_by_dir() -> None:
    assert set(dir(treeprop_ray)) == {*treeprop_ray.__all__, "__version__"}
    for name in treeprop_ray.__all__:
        assert inspect.cleandoc(getattr(treeprop_ray, name).__doc__ or ""), name


def own_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that are ours, also inherited ones."""
    for base in kind.__mro__:
        for name, method in vars(base).items():
            is_method = callable(getattr(method, "__func__", method))
            is_value = isinstance(method, property | cached_property)
            ours = base.__module__.startswith("treeprop_ray")
            if ours and not name.startswith("_") and (is_method or is_value):
                yield f"{base.__name__}.{name}", method


def test_every_public_method_has_a_docstring() -> None:
    kinds = [getattr(treeprop_ray, name) for name in treeprop_ray.__all__]
    methods = [m for kind in [*kinds, Trainer] if isinstance(kind, type) for m in own_methods(kind)]
    assert len(methods) > 40
    without = [name for name, method in methods if not inspect.cleandoc(method.__doc__ or "")]
    assert not without
