"""HTML pages: templates/*.html filled with values. Text is escaped, a missing value is an error."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

ENVIRONMENT = Environment(
    loader=PackageLoader("treeprop_ray.reporting", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(name: str, /, **values: Any) -> str:
    """The page that templates/<name> makes of the values."""
    return ENVIRONMENT.get_template(name).render(**values)
