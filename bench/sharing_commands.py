"""`python -m bench`: trainings whose links are shared, or change."""

from __future__ import annotations

from typing import Annotated

import typer

from bench import congestion, contention, rate_change, record, two_jobs
from bench.shown import Json, Quick, Rounds, progress, show

app = typer.Typer()
Policies = Annotated[str, typer.Option(help="Comma-separated.")]


@app.command("contention")
def contention_command(
    policies: Policies = "ddp,kernel",
    flows: Annotated[str, typer.Option(help="Bulk TCP flows a host, from 0.")] = "0,1,4,16",
    rounds: Rounds = 2,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Training beside bulk TCP flows: what it loses, and what they get."""
    counts = sorted({0, *map(int, flows.split(","))})
    if quick:
        counts, rounds = counts[:: len(counts) // 2], 1
    names = policies.split(",")
    with progress(len(counts) * len(names) * rounds) as step:
        rows, lab = contention.measure(names, counts, rounds, step)
    columns = ("policy", "flows", "kept", "bulk_bps", "link_use")
    show("contention, seconds an iteration", columns, "iteration_s", rows, "{:.3f}")
    record.save(json_file, "contention", rows, lab=lab)


@app.command("two-jobs")
def two_jobs_command(rounds: Rounds = 2, quick: Quick = False, json_file: Json = None) -> None:
    """Two trainings on the same links, begun together, beside each alone."""
    scenarios = list(two_jobs.SCENARIOS)[:1] if quick else list(two_jobs.SCENARIOS)
    rounds, iterations = (1, 6) if quick else (rounds, two_jobs.ITERATIONS)
    with progress(two_jobs.steps(scenarios, rounds)) as step:
        rows, lab = two_jobs.measure(scenarios, rounds, step, iterations=iterations)
    shown = [row | {"alone, mean": row["alone"]["mean"]} for row in rows]
    columns = ("scenario", "variant", "job", "alone, mean")
    keys = ("mean", "p99", "median", "n")
    show("two jobs, seconds an iteration", columns, "iteration_s", shown, "{:.3f}", keys)
    record.save(json_file, "two-jobs", rows, lab=lab)


@app.command("rate-change")
def rate_change_command(
    policies: Policies = "ddp,bytescheduler,prophet,kernel",
    rounds: Rounds = 1,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """The links' rate falls from 1 Gbit/s to 400 Mbit/s in mid-run, and rises again."""
    names = policies.split(",")
    names = [names[0], names[-1]] if quick else names
    phase_s = 4.0 if quick else rate_change.PHASE_S
    with progress(len(names) * (rounds + 1)) as step:
        rows, lab = rate_change.measure(names, rounds, step, phase_s=phase_s, quick=quick)
    columns = ("policy", "phase", "rate_bps", "oracle_s")
    show("rate change, seconds an iteration", columns, "iteration_s", rows, "{:.3f}")
    record.save(json_file, "rate-change", rows, lab=lab)


@app.command("congestion")
def congestion_command(rounds: Rounds = 2, quick: Quick = False, json_file: Json = None) -> None:
    """cubic, bbr and reno under the policy kernel."""
    rounds, iterations = (1, 4) if quick else (rounds, congestion.ITERATIONS)
    with progress(len(congestion.present()) * rounds) as step:
        rows, lab = congestion.measure(rounds, step, iterations=iterations)
    show("congestion, seconds an iteration", ("congestion",), "iteration_s", rows, "{:.3f}")
    record.save(json_file, "congestion", rows, lab=lab)
