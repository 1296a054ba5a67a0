"""Pages show what the results say, and two runs' ratios are compared."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import charts, compare, ratios, report, tables
from tlsched.errors import ConfigError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "machine": "x86_64",
    "cpus": 2,
    "kernel": "6.1",
    "packages": {"torch": "2.13"},
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "abc",
}


def spread(median: float) -> dict[str, float]:
    return {"median": median, "min": median / 2, "max": median * 2, "n": 3}


def step_row(policy: str, seconds: float, **other: Any) -> dict[str, Any]:
    row = {"model": "vgg16", "ratio": 1.0, "hosts": 4, "rate_bps": 10**9, "backend": "allreduce"}
    took = {"iteration_s": spread(seconds), "oracle_s": 0.7, "floor_s": 0.69, "simulated_s": None}
    return {**row, "policy": policy, **took, **other}


def result(bench: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"bench": bench, "environment": ENVIRONMENT, "rows": list(rows)}


STEP = result("step", step_row("ddp", 1.0), step_row("ddp-best", 0.9), step_row("kernel", 0.72))


@pytest.fixture
def place(tmp_path: Path) -> report.Place:
    place = report.Place(tmp_path)
    place.results.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a\n<!-- bench: headline -->\nold\n<!-- end -->\nb\n")
    benchmarks = "<!-- bench: step -->\n<!-- end -->\n\n<!-- bench: host -->\n<!-- end -->\n"
    (tmp_path / "docs" / "benchmarks.md").write_text(benchmarks)
    (place.results / "step.json").write_text(json.dumps(STEP))
    return place


def test_readme_and_benchmarks_show_the_results_that_lie_beside_them() -> None:
    assert report.stale(report.Place(ROOT)) == [], "run `python -m bench report`"


def test_every_benchmark_with_a_result_has_a_block() -> None:
    text = "".join(page.read_text() for page in report.Place(ROOT).pages)
    for file in (ROOT / "bench" / "results").glob("*.json"):
        assert f"<!-- bench: {file.stem} -->" in text


def test_blocks_are_replaced_and_the_rest_is_left_alone(place: report.Place) -> None:
    image = place.images / "step.png"
    assert report.write(place) == [*place.pages, image]
    readme, benchmarks = (page.read_text() for page in place.pages)
    assert readme.startswith("a\n<!-- bench: headline -->\n| model |")
    assert readme.endswith("<!-- end -->\nb\n")
    assert "| vgg16 | 0.900 | 0.720 | 1.25 | 97.2% |" in readme
    assert "![step](images/step.png)" in benchmarks
    assert "<!-- bench: host -->\nNot measured yet.\n<!-- end -->" in benchmarks
    assert report.stale(place) == []
    assert report.write(place) == []


def test_another_result_makes_page_and_chart_stale(place: report.Place) -> None:
    report.write(place)
    other = result("step", step_row("ddp", 1.0), step_row("kernel", 0.8))
    (place.results / "step.json").write_text(json.dumps(other))
    assert set(report.stale(place)) == {*place.pages, place.images / "step.png"}
    report.write(place)
    assert charts.shows(place.images / "step.png", other)
    page = place.pages[1]
    page.write_text(page.read_text().replace("0.800", "0.700"))
    assert report.stale(place) == [page]


def test_a_block_of_an_unknown_name_is_refused(place: report.Place) -> None:
    (place.results / "stepp.json").write_text(json.dumps(STEP))
    place.pages[0].write_text("<!-- bench: stepp -->\n<!-- end -->\n")
    with pytest.raises(ConfigError, match="asks for stepp"):
        report.write(place)


def test_ratios_of_step() -> None:
    found = {(r.case.rpartition(", ")[2], r.what): r.value for r in ratios.of(STEP)}
    assert found["kernel", "over ddp"] == pytest.approx(0.9 / 0.72)  # the best of DDP's
    assert found["ddp", "of oracle"] == pytest.approx(0.7)
    assert ("ddp-best", "over ddp") not in found


def test_every_result_in_the_checkout_can_be_shown_and_compared_with_itself() -> None:
    results = ROOT / "bench" / "results"
    for file in results.glob("*.json"):
        if file.name != "demo.json":
            assert "| --- |" in tables.markdown(ratios.load(file))
    found = compare.compare(results, results)
    assert found.changes
    assert not found.fell


def run_compare(*paths: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bench", "compare", *map(str, paths)]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


@pytest.mark.parametrize(("seconds", "code"), [(0.74, 0), (0.70, 0), (0.77, 1)])
def test_compare_exits_with_1_when_a_ratio_fell(tmp_path: Path, seconds: float, code: int) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(STEP))
    rows = [step_row("ddp", 1.0), step_row("ddp-best", 0.9), step_row("kernel", seconds)]
    new.write_text(json.dumps(result("step", *rows, step_row("fifo", 0.9))))
    found = compare.compare(old, new)
    assert found.fell == bool(code)
    assert [case.rpartition(", ")[0] for case in found.only_new] == [
        "step, vgg16, ratio 1, 4 hosts, allreduce, fifo"
    ] * 2
    done = run_compare(old, new)
    assert done.returncode == code
    assert ("fell" in done.stdout) == bool(code)


def test_compare_of_what_has_nothing_in_common_is_refused(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    shutil.copy(ROOT / "bench" / "results" / "host.json", old)
    new.write_text(json.dumps(STEP))
    for pair in ((old, new), (tmp_path / "none.json", new)):
        done = run_compare(*pair)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.strip().splitlines()) == 1
