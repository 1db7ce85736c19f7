"""Continue a text with a trained language model.

    python -m treeprop_ray.generate run=results/runs/<name> prompt="The list" path=full
    python -m treeprop_ray.generate run=results/runs/<name> prompt="The list" draft=auto
    python -m treeprop_ray.generate run=results/runs/<name> prompt="The list" draft=spine-1 ahead=4

With draft= a short path drafts tokens and the path verifies several at once (self-speculative
decoding): the text has the same distribution as without drafts, with temperature=0 it is the same
text. draft=auto measures acceptance and times while it decodes, picks path and length, and drafts
only where that is faster (so a sampled text may differ from run to run, with the same seed). Both
are timed one after the other, and the acceptance rate of the drafts is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from treeprop_ray import config
from treeprop_ray.config import cli
from treeprop_ray.errors import UserError
from treeprop_ray.inference.settings import GenerateSettings


def load(words: Sequence[str]) -> GenerateSettings:
    """Settings from command-line words; text is taken as it stands, not as YAML."""
    words = [
        f"prompt={json.dumps(w[7:], ensure_ascii=False)}" if w.startswith("prompt=") else w
        for w in words
    ]
    settings: GenerateSettings = config.merge(GenerateSettings, ("", config.parse_overrides(words)))
    if not settings.prompt:
        raise UserError("prompt= : at least one character")
    return settings


def run(settings: GenerateSettings) -> None:
    """The generate command."""
    from treeprop_ray.inference.language import continued

    text, about = continued(settings)
    print(text)
    print(about, file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m treeprop_ray.generate`."""
    return cli.main(__doc__ or "", GenerateSettings, load, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
