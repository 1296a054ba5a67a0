"""What README and docs/benchmarks.md say of the results: written, or checked, never typed by hand.

A page holds blocks between ``<!-- bench: NAME -->`` and ``<!-- end -->``, which are replaced by the
table of bench/results/NAME.json and its chart, if it has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import charts, tables
from tlsched.errors import ConfigError

SERVERS = "-ps"  # the same benchmark over parameter servers has a result of its own
_BLOCK = re.compile(r"(<!-- bench: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """A checkout: where its results, its pages and its charts lie."""

    root: Path

    @property
    def results(self) -> Path:
        """The folder of the results."""
        return self.root / "bench" / "results"

    @property
    def images(self) -> Path:
        """The folder of the charts."""
        return self.root / "docs" / "images"

    @property
    def pages(self) -> tuple[Path, ...]:
        """The pages with blocks."""
        return self.root / "README.md", self.root / "docs" / "benchmarks.md"


def write(place: Place) -> list[Path]:
    """Bring pages and charts up to date; what was changed."""
    changed = stale(place)
    for page in place.pages:
        page.write_text(_filled(page, place))
    for path, result in _charts(place):
        if path in changed:
            charts.draw(result, path)
    return changed


def stale(place: Place) -> list[Path]:
    """Pages and charts that show something else than the results say."""
    pages = [page for page in place.pages if page.read_text() != _filled(page, place)]
    return pages + [path for path, result in _charts(place) if not charts.shows(path, result)]


def _filled(page: Path, place: Place) -> str:
    """``page``'s text with every block as it should be."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{_block(match[2], page, place)}\n{match[3]}"

    return _BLOCK.sub(fill, page.read_text())


def _block(name: str, page: Path, place: Place) -> str:
    source = place.results / f"{'step' if name == 'headline' else name}.json"
    if not source.exists():
        return "Not measured yet."
    result = json.loads(source.read_text())
    if name == "demo":
        return tables.demo(result)
    if name == "headline":
        return tables.headline(result)
    if name.removesuffix(SERVERS) not in tables.BENCHES:
        raise ConfigError(f"{page} asks for {name}", hint=f"use {', '.join(tables.BENCHES)}")
    text = tables.markdown(result)
    if name in charts.CHARTS:
        image = (place.images / f"{name}.png").relative_to(page.parent)
        text += f"\n\n![{name}]({image})"
    return text


def _charts(place: Place) -> Iterator[tuple[Path, dict[str, Any]]]:
    for name in charts.CHARTS:
        source = place.results / f"{name}.json"
        if source.exists():
            yield place.images / f"{name}.png", json.loads(source.read_text())
