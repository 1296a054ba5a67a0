"""Two runs' ratios side by side: which of them fell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench import ratios
from bench.ratios import Ratio
from tlsched.errors import ConfigError

TOLERANCE = 0.05  # of a ratio: what falls by more has become worse


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio in both runs."""

    old: Ratio
    new: Ratio

    @property
    def change(self) -> float:
        """By which part of the old value it rose."""
        return self.new.value / self.old.value - 1

    @property
    def fell(self) -> bool:
        """Whether it is worse by more than TOLERANCE."""
        return self.change < -TOLERANCE


@dataclass(frozen=True, slots=True)
class Comparison:
    """What both runs have, and the cases (as text) that only one of them has."""

    changes: list[Change]
    only_old: list[str]
    only_new: list[str]

    @property
    def fell(self) -> bool:
        """Whether any ratio fell."""
        return any(change.fell for change in self.changes)


def compare(old: Path, new: Path) -> Comparison:
    """Compare two results, or two folders of them by their files' names.

    Raises ConfigError when a file is no result, or nothing is in both.
    """
    before, after = (_by_case(_read(path)) for path in (old, new))
    changes = [Change(one, after[case]) for case, one in before.items() if case in after]
    if not changes:
        raise ConfigError(
            f"{old} and {new} have no ratio in common", hint="give results of the same benchmark"
        )
    return Comparison(
        changes,
        [", ".join(case) for case in before if case not in after],
        [", ".join(case) for case in after if case not in before],
    )


def _read(path: Path) -> list[Ratio]:
    if not path.is_dir():
        return ratios.of(ratios.load(path))
    found = []
    for file in sorted(path.glob("*.json")):
        if file.name != "demo.json":  # the demonstration's, which is no benchmark
            found += ratios.of(ratios.load(file))
    return found


def _by_case(found: Iterable[Ratio]) -> dict[tuple[str, str, str], Ratio]:
    return {(one.bench, one.case, one.what): one for one in found}
