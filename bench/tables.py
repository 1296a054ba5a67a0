"""Results as Markdown tables: the blocks that README and docs/benchmarks.md show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench import ratios
from bench.ratios import STEP_CASE, Row

NAMES = {
    "ddp": "DDP",
    "ddp-best": "DDP, best bucket size",
    "fsdp2": "FSDP2 (`fully_shard`)",
}


def markdown(result: dict[str, Any]) -> str:
    """The table of ``result``, and below it where and when it was measured."""
    return f"{_TABLES[result['bench']](result['rows'])}\n\n{provenance(result)}"


def provenance(result: dict[str, Any]) -> str:
    """One line: the machine, the versions, date and commit."""
    where = result["environment"]
    cpu = where.get("cpu", where["machine"])
    torch, date = where["packages"]["torch"], where["date"][:10]
    return (
        f"*{cpu}, {where['cpus']} CPUs, Linux {where['kernel']}, torch {torch}, "
        f"{date}, commit {where['commit']}*"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def headline(result: dict[str, Any]) -> str:
    """Of `step` at ratio 1: DDP at its best beside the policy kernel, a line a model."""
    rows = [row for row in result["rows"] if row["ratio"] == 1 and row["backend"] == "allreduce"]
    lines = []
    for row in rows:
        gain = ratios.over_ddp(row, rows, STEP_CASE)
        if row["policy"] == "kernel" and gain is not None:
            ddp_s = gain * row["iteration_s"]["median"]
            seconds = row["iteration_s"]["median"]
            share = row["oracle_s"] / seconds
            lines.append([row["model"], _3(ddp_s), _3(seconds), f"{gain:.2f}", _pct(share)])
    tried = any(row["policy"] == "ddp-best" for row in rows)
    ddp = "DDP at its best, s" if tried else "DDP, s"
    heads = ("model", ddp, "tlsched, s", "DDP = 1", "of what is possible")
    return f"{table(heads, lines)}\n\n{provenance(result)}"


def demo(rows: list[Row]) -> str:
    """The two tables that `tlsched demo` prints."""
    real = [
        [r["policy"], f"{r['loss']:.6f}", f"{r['accuracy']:.3f}", _3(r["iteration_s"])]
        for r in rows
        if r["part"] == "real"
    ]
    replayed = [r for r in rows if r["part"] == "replay"]
    floor_s = replayed[0]["of_floor"] * replayed[0]["iteration_s"]
    lines = [
        [r["policy"], _3(r["iteration_s"]), f"{r['speedup']:.2f}", f"{r['of_floor']:.2f}"]
        for r in replayed
    ]
    counts = f"medians of {rows[0]['iterations']} and of {replayed[0]['iterations']} iterations"
    return "\n\n".join(
        (
            table(("real training: digits", "loss", "accuracy", "s/iteration"), real),
            table(
                (f"replayed VGG-16, floor {_3(floor_s)} s", "s/iteration", "DDP = 1", "floor / s"),
                lines,
            ),
            f"({counts}, the replayed policies taking turns)",
        )
    )


def _step(rows: list[Row]) -> str:
    heads = (
        "model",
        "ratio",
        "policy",
        "s/iteration",
        "min … max",
        "oracle",
        "of oracle",
        "DDP = 1",
        "simulated",
        "measured / simulated",
    )
    lines = []
    for row in rows:
        gain = ratios.over_ddp(row, rows, STEP_CASE)
        simulated_s = row["simulated_s"]
        off = row["iteration_s"]["median"] / simulated_s if simulated_s else None
        lines.append(
            [
                row["model"] + _servers(row),
                f"{row['ratio']:g}",
                _policy(row),
                *_spread(row),
                _3(row["oracle_s"]),
                _pct(row["oracle_s"] / row["iteration_s"]["median"]),
                "" if gain is None else f"{gain:.2f}",
                _3(simulated_s),
                "" if off is None else f"{off:.2f}",
            ]
        )
    return table(heads, lines)


def _servers(row: Row) -> str:
    if row["backend"] != "ps":
        return ""
    return f", {row['servers']} servers" if row["servers"] else ", servers beside workers"


def _contention(rows: list[Row]) -> str:
    heads = ("bulk flows a host", "policy", "s/iteration", "min … max", "speed kept", "bulk Mbit/s")
    lines = [
        [
            str(row["flows"]),
            _policy(row),
            *_spread(row),
            _pct(row["kept"]),
            f"{row['bulk_bps'] / 1e6:.0f}" if row["flows"] else "",
            _pct(row["link_use"]),
        ]
        for row in rows
    ]
    return table((*heads, "link used"), lines)


def _two_jobs(rows: list[Row]) -> str:
    heads = ("jobs", "variant", "job", "mean s", "p99 s", "mean / alone", "p99 / alone")
    lines = []
    for row in rows:
        took, alone = row["iteration_s"], row["alone"]
        job = f"{row['job']} (ratio {row['ratio']:.2g})"
        more = [f"{took[name] / alone[name]:.2f}" for name in ("mean", "p99")]
        shown = [row["scenario"], row["variant"], job, _3(took["mean"]), _3(took["p99"])]
        lines.append([*shown, *more])
    return table(heads, lines)


def _rate_change(rows: list[Row]) -> str:
    heads = ("policy", "phase", "Mbit/s", "s/iteration", "min … max", "oracle", "of oracle")
    lines = [
        [
            _policy(row),
            str(row["phase"]),
            f"{row['rate_bps'] / 1e6:.0f}",
            *_spread(row),
            _3(row["oracle_s"]),
            _pct(row["oracle_s"] / row["iteration_s"]["median"]),
        ]
        for row in rows
    ]
    return table(heads, lines)


def _scale(rows: list[Row]) -> str:
    heads = ("hosts", "policy", "measured s", "simulated s", "floor s")
    lines = [
        [
            str(row["hosts"]),
            _policy(row),
            _3(row["iteration_s"]["median"]) if row["iteration_s"] else "",
            _3(row["simulated_s"]),
            _3(row["floor_s"]),
        ]
        for row in rows
    ]
    return table(heads, lines)


def _congestion(rows: list[Row]) -> str:
    best = min(row["iteration_s"]["median"] for row in rows)
    heads = ("congestion control", "s/iteration", "min … max", "of the best")
    return table(
        heads,
        [
            [row["congestion"], *_spread(row), _pct(best / row["iteration_s"]["median"])]
            for row in rows
        ],
    )


def _real(rows: list[Row]) -> str:
    heads = ("model", "policy", "seconds to loss", "min … max", "loss", "iterations", "DDP = 1")
    lines = []
    for row in rows:
        to_s = row["to_loss_s"]
        spread = f"{to_s['min']:.2f} … {to_s['max']:.2f}"
        shown = [row["model"], _policy(row), f"{to_s['median']:.2f}", spread, f"{row['target']:g}"]
        lines.append([*shown, str(row["iterations"]), f"{row['over_ddp']:.2f}"])
    return table(heads, lines)


def _overhead(rows: list[Row]) -> str:
    heads = ("policy", "s/iteration", "min … max", "of DDP's speed", "peak MiB")
    lines = []
    for row in rows:
        shown = [_policy(row), *_spread(row), f"{row['of_ddp']:.3f}"]
        lines.append([*shown, f"{row['peak_mib']['median']:.0f}", *_processor(row)])
    return table((*heads, "CPU ms a step", "start-up s"), lines)


def _processor(row: Row) -> list[str]:
    if "cpu_ms" not in row:
        return ["", ""]
    return [f"{row['cpu_ms']['median']:.1f}", f"{row['startup_s']['median']:.2f}"]


def _plain(names: Sequence[str], figure: str, unit: str, form: str) -> Callable[[list[Row]], str]:
    """For a benchmark of one figure: the columns ``names``, then its median and range."""

    def show(rows: list[Row]) -> str:
        lines = []
        for row in rows:
            shown = [form.format(row[figure][key]) for key in ("median", "min", "max")]
            lines.append([*(str(row[n]) for n in names), shown[0], f"{shown[1]} … {shown[2]}"])
        return table((*names, unit, "min … max"), lines)

    return show


def _classifier(rows: list[Row]) -> str:
    heads = ("packet", "trust", "band", "ns a packet", "min … max", "of these, the program's own")
    lines = []
    for row in rows:
        if "packet" in row:
            ns, own = row["ns"], row["own_ns"]
            spread = [f"{ns['median']:.0f}", f"{ns['min']:.0f} … {ns['max']:.0f}"]
            shown = [*spread, f"{own['median']:.0f}"]
            lines.append([row["packet"], row["trust"], row["band"], *shown])
    text = table(heads, lines)
    for row in rows:
        if "of_without" in row:
            share = row["of_without"]
            text += (
                f"\n\nOver a veth that nothing shapes one TCP flow of iperf3 gets "
                f"{row['gbit_s']['median']:.1f} Gbit/s with the classifier, "
                f"{share['median']:.3f} of what it gets without "
                f"({share['min']:.3f} … {share['max']:.3f}, pair by pair)."
            )
    return text


def _policy(row: Row) -> str:
    name = str(NAMES.get(row["policy"], row["policy"]))
    cap = row.get("bucket_cap_mb")
    return name if cap is None else f"{name} ({cap} MiB)"


def _spread(row: Row) -> list[str]:
    took = row["iteration_s"]
    return [_3(took["median"]), f"{_3(took['min'])} … {_3(took['max'])}"]


def _3(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


def _pct(share: float) -> str:
    return f"{share:.1%}"


def _serving(rows: list[Row]) -> str:
    (row,) = rows
    heads = ("workers", "Gbit/s in, and as many out", "min … max", "server MiB")
    rate = row["gbit_s"]
    shown = [str(row["workers"]), f"{rate['median']:.2f}", f"{rate['min']:.2f} … {rate['max']:.2f}"]
    shown.append(f"{row['server_peak_mib']['median']:.0f}")
    return f"{table(heads, [shown])}\n\n```\n{row['profile'].strip()}\n```"


_TABLES: dict[str, Callable[[list[Row]], str]] = {
    "step": _step,
    "serving": _serving,
    "contention": _contention,
    "two-jobs": _two_jobs,
    "rate-change": _rate_change,
    "scale": _scale,
    "congestion": _congestion,
    "real": _real,
    "overhead": _overhead,
    "classifier": _classifier,
    "host": _plain(("command",), "seconds", "seconds", "{:.2f}"),
    "attach": _plain(("command",), "ms", "longest stop, ms", "{:.1f}"),
    "shaping": _plain(("rate", "mtu"), "share", "share of the rate", "{:.3f}"),
    "bucket": _plain(("what",), "microseconds", "microseconds", "{:.0f}"),
    "simulator": _plain(("hosts", "buckets", "what"), "seconds", "seconds", "{:.3f}"),
}
BENCHES = tuple(_TABLES)
