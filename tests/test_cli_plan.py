"""`tlsched plan` and `tlsched simulate`, as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.planning.profiles import equal_layers
from tlsched.planning.compare import SIMULATED
from tlsched.planning.fabric import Fabric

EXIT_BAD_INPUT = 2

USERS_MODEL = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)), (torch.empty(64, 1000),)

def no_inputs():
    return nn.Linear(3, 3)

def wrong_inputs():
    return nn.Linear(3, 3), (torch.empty(4),)

def broken():
    raise KeyError("weights")
"""


def _tlsched(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tlsched", *arguments]
    # The working tree's tlsched, also from another folder.
    env = {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "PATH": "/usr/bin:/bin",
        "COLUMNS": "200",
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=cwd, env=env, check=False
    )


def _json(*arguments: str, cwd: Path | None = None) -> Any:
    done = _tlsched(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    equal_layers(24, 10_000_000, 1.0, Fabric(8, 10e9)).save(path)
    return path


def test_a_profile_is_simulated_under_every_policy(profile: Path) -> None:
    rows = _json("simulate", str(profile), "--policy", ",".join(SIMULATED))
    assert [row["policy"] for row in rows] == list(SIMULATED)
    seconds = {row["policy"]: row["iteration_s"] for row in rows}
    assert seconds["oracle"] <= seconds["kernel"] < seconds["fifo"]
    assert all(row["floor_s"] <= row["iteration_s"] for row in rows)
    assert all((row["hosts"], row["rate_bps"]) == (8, 10e9) for row in rows)


def test_a_timeline_has_each_bucket(profile: Path) -> None:
    (row,) = _json("simulate", str(profile), "--policy", "kernel", "--timeline")
    assert len(row["timeline"]) == row["buckets"]
    assert all(times["ready_s"] < times["sent_s"] for times in row["timeline"])


def test_several_rates_are_a_table_each(profile: Path) -> None:
    rates = ("--rate", "10gbit", "--rate", "100gbit")
    done = _tlsched("simulate", str(profile), *rates, "--policy", "ddp", "--policy", "kernel")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("floor") == 2
    assert "8 hosts at 100gbit" in done.stdout


def test_a_measured_profile_is_planned(profile: Path, tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    rates = ("--rate", "10gbit", "--rate", "1tbit")
    answers = _json("plan", "--profile", str(profile), *rates, "--picture", str(picture))
    pays, idle = answers
    assert "x at 10gbit" in pays["verdict"]
    assert idle["verdict"].startswith("nothing to gain at 1tbit: communication is ")
    assert sum(bucket["bytes"] for bucket in pays["buckets"]) == 240_000_000
    assert {bucket["lane"] for bucket in pays["buckets"]} <= set(range(6))
    assert [row["policy"] for row in pays["policies"]] == list(SIMULATED)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_shape_is_planned() -> None:
    done = _tlsched("plan", "resnet50", "--rate", "1gbit", "--hosts", "4", "--flops", "0.2t")
    assert done.returncode == 0, done.stderr
    assert "resnet50: 4 hosts at 1gbit, 102.2 MB of gradients" in done.stdout
    assert "lanes of policy kernel" in done.stdout
    assert " at 1gbit (no schedule gains more than " in done.stdout


def test_a_users_model_is_planned(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USERS_MODEL)
    (answer,) = _json("plan", "mine:small", "--flops", "1t", cwd=tmp_path)
    flops = 3 * 2 * 2 * 64 * 1000 * 1000
    assert answer["policies"][0]["compute_s"] == pytest.approx(flops / 1e12)
    assert sum(bucket["bytes"] for bucket in answer["buckets"]) == 4 * 2 * (1000 * 1000 + 1000)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["plan"], "give either a model or a profile"),
        (["plan", "alexnet"], "no shape 'alexnet'; use one of vgg16"),
        (["plan", "mine:missing"], "mine:missing cannot be imported"),
        (["plan", "nowhere:model"], "nowhere:model cannot be imported"),
        (["plan", "mine:no_inputs"], "does not return a module and its inputs"),
        (["plan", "mine:wrong_inputs"], "Linear cannot run on the meta device"),
        (["plan", "mine:broken"], "KeyError: 'weights'"),
        (["plan", "vgg16", "--flops", "fast"], 'FLOP rate "fast" is not understood'),
        (["plan", "vgg16", "--flops", "0"], 'FLOP rate "0" is not understood'),
        (["plan", "vgg16", "--rate", "0gbit"], "rate"),
        (["plan", "vgg16", "--backend", "mpi"], "there is no backend"),
        (["plan", "vgg16", "--servers", "2"], "--servers is for parameter servers"),
        (["simulate", "missing.json"], "profile missing.json cannot be read"),
        (["simulate", "mine.py"], "mine.py is not a profile"),
        (["simulate", "p.json", "--policy", "magic"], "no policy 'magic'"),
        (["simulate", "p.json", "--policy", ","], "no policy is named"),
    ],
)
def test_bad_input_is_one_line_and_2(tmp_path: Path, arguments: list[str], wrong: str) -> None:
    (tmp_path / "mine.py").write_text(USERS_MODEL)
    equal_layers(3, 1000, 1.0).save(tmp_path / "p.json")
    done = _tlsched(*arguments, cwd=tmp_path)
    assert done.returncode == EXIT_BAD_INPUT
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert wrong in done.stderr


def test_a_picture_that_cannot_be_written_is_named(profile: Path, tmp_path: Path) -> None:
    where = str(tmp_path / "nowhere" / "x.png")
    done = _tlsched("plan", "--profile", str(profile), "--picture", where)
    assert done.returncode == EXIT_BAD_INPUT
    assert "cannot be drawn" in done.stderr
