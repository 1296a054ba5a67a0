"""`python -m bench`: what asks about one host, its link and its processors."""

from __future__ import annotations

import typer

from bench import (
    attach,
    bucket,
    classifier,
    host,
    record,
    serving,
    shaping,
    simulator,
    throughput,
)
from bench.shown import Json, Quick, Rounds, show

app = typer.Typer()


@app.command("classifier")
def classifier_command(rounds: Rounds = 9, quick: Quick = False, json_file: Json = None) -> None:
    """Nanoseconds a packet that the classifier costs, and what an unshaped link carries with it."""
    rounds = 3 if quick else rounds
    rows = classifier.measure(rounds)
    show("classifier, ns a packet", ("packet", "trust", "band"), "ns", rows, "{:.0f}")
    columns = ("packet", "trust", "band")
    show("the same without what an empty program takes", columns, "own_ns", rows, "{:.0f}")
    without, with_it = throughput.measure(rounds)
    show("iperf3 over a veth, Gbit/s", ("classifier",), "gbit_s", [without, with_it], "{:.2f}")
    pairs = [with_it | {"classifier": "with / without"}]
    show("the same, pair by pair", ("classifier",), "of_without", pairs, "{:.3f}")
    record.save(json_file, "classifier", [*rows, without, with_it])


@app.command("serving")
def serving_command(rounds: Rounds = 5, quick: Quick = False, json_file: Json = None) -> None:
    """Gbit/s that one parameter server sums for four workers, and where its time goes."""
    rows = serving.measure(1 if quick else rounds)
    show("a server's gradients, Gbit/s in", ("workers",), "gbit_s", rows, "{:.2f}")
    typer.echo(rows[0]["profile"])
    record.save(json_file, "serving", rows)


@app.command("host")
def host_command(rounds: Rounds = 5, quick: Quick = False, json_file: Json = None) -> None:
    """Seconds that attach, status and detach take as commands."""
    rows = host.measure(2 if quick else rounds)
    show("commands, seconds", ("command",), "seconds", rows, "{:.2f}")
    record.save(json_file, "host", rows)


@app.command("attach")
def attach_command(rounds: Rounds = 10, quick: Quick = False, json_file: Json = None) -> None:
    """Milliseconds for which a busy link stands still while it is attached or detached."""
    rows = attach.measure(2 if quick else rounds)
    show("attach, longest stop in ms", ("command",), "ms", rows, "{:.1f}")
    record.save(json_file, "attach", rows)


@app.command("shaping")
def shaping_command(rounds: Rounds = 5, quick: Quick = False, json_file: Json = None) -> None:
    """Share of its rate that an attached link reaches, at 100 Mbit/s, 1 and 10 Gbit/s."""
    rows = shaping.measure(1 if quick else rounds)
    show("shaping, share of the rate", ("rate", "mtu"), "share", rows, "{:.3f}")
    record.save(json_file, "shaping", rows)


@app.command("bucket")
def bucket_command(rounds: Rounds = 5, quick: Quick = False, json_file: Json = None) -> None:
    """Microseconds of Python that a bucket costs a step."""
    rows = bucket.measure(2 if quick else rounds)
    show("bucket, microseconds", ("what",), "microseconds", rows, "{:.0f}")
    record.save(json_file, "bucket", rows)


@app.command("simulator")
def simulator_command(rounds: Rounds = 3, quick: Quick = False, json_file: Json = None) -> None:
    """Seconds for one simulated iteration, and for a plan: 64 hosts, 200 buckets; 1,024 and 400."""
    rows = simulator.measure(1 if quick else rounds, sizes=1 if quick else len(simulator.SIZES))
    show("simulator, seconds", ("hosts", "buckets", "what"), "seconds", rows, "{:.3f}")
    record.save(json_file, "simulator", rows)
