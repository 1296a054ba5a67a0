"""What the pages under docs/ claim is so."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent / "training"
PARITY = Path(__file__).parent.parent / "docs" / "ddp-parity.md"

ROW = re.compile(r"^\| `(test_\w+)` \| (.+) \| (held|differs|no) \| (.+) \|$", re.MULTILINE)
CLAIM = re.compile(r"`(test_\w+\.py)::(test_\w+)(?:\[(\w+)\])?`")
HELD_AT_LEAST = 50


def _rows() -> list[tuple[str, str, str, str]]:
    return ROW.findall(PARITY.read_text())


def _torchs_tests() -> list[str]:
    """Names in torch's source, also those that are in a string there. Nothing is imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "testing" / "_internal" / "distributed"
    names = re.findall(r"def (test_\w*)\(", (folder / "distributed_test.py").read_text())
    return [n for n in names if re.search("ddp|distributeddataparallel", n, re.IGNORECASE)]


@cache
def _functions(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _bodies() -> set[str]:
    """The names that test_parity_adapter.py runs."""
    tree = ast.parse((TESTS / "test_parity_adapter.py").read_text())
    (values,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BODIES"
    )
    return set(ast.literal_eval(values))


def test_ddp_parity_has_a_line_for_each_of_torchs_tests() -> None:
    assert [name for name, *_ in _rows()] == _torchs_tests()
    assert len(_rows()) == 86


def test_ddp_parity_counts_what_it_lists() -> None:
    counts = Counter(verdict for _, _, verdict, _ in _rows())
    text = PARITY.read_text()
    for verdict, count in counts.items():
        assert f"| {verdict} | {count} |" in text
    assert counts["held"] >= HELD_AT_LEAST


def test_every_test_that_ddp_parity_names_exists_and_runs() -> None:
    for name, _, verdict, text in _rows():
        claims = CLAIM.findall(text)
        assert bool(claims) == (verdict != "no"), name
        assert text.count("::") == len(claims), name
        for file, test, case in claims:
            function = _functions(file).get(test)
            assert function is not None, f"{name}: there is no {file}::{test}"
            source = ast.unparse(function)
            marks = [ast.unparse(decorator) for decorator in function.decorator_list]
            assert not any("skip" in mark or "xfail" in mark for mark in marks), test
            assert "pytest.skip" not in source, test
            if case:
                assert case == name
                assert case in _bodies(), f"{case} is not run"


def test_every_body_that_is_run_is_claimed() -> None:
    claimed = {case for *_, text in _rows() for _, _, case in CLAIM.findall(text) if case}
    assert claimed == _bodies()
