"""What one parameter server sums: gigabits a second in, and as many out, over unshaped veths.

A server and four workers in namespaces of their own, all on this machine's cores. Workers push and
pull 64 MiB again and again, in buckets over all lanes, as a training without computing would.
"""

from __future__ import annotations

import cProfile
import io
import json
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.record import spread
from tests import netns
from tlsched.bands import LANE_COUNT
from tlsched.lab.namespaces import enable_gro

WORKERS = 4
MIB = 64
BUCKETS = 16
TIMES = 20
PORT = 7150
_JOB = bytes(16)
_COSTS = ("server_cpu_s", "workers_cpu_s", "server_peak_mib")
_LINES = 12  # of the profile


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row: gigabits of gradients a second that come in (as many go out), and a profile.

    ``server_cpu_s`` and ``workers_cpu_s`` are the processor seconds that the server and all workers
    together take for each gigabit that comes in. The profile is of a run of its own, which does not
    count, since it slows the server down.
    """
    found = [_run(profiled=False) for _ in range(rounds)]
    profile = _run(profiled=True)["profile"]
    return [
        {
            "bench": "serving",
            "workers": WORKERS,
            "gbit_s": spread([one["gbit_s"] for one in found]),
            **{name: spread([one[name] for one in found]) for name in _COSTS},
            "profile": profile,
        }
    ]


def _run(*, profiled: bool) -> dict[str, Any]:
    with _star() as (hub, leaves):
        server = _start(hub, "serve", str(int(profiled)))
        assert server.stdout is not None
        server.stdout.readline()  # it listens
        workers = [
            _start(leaf, "push", f"10.98.{rank}.1", str(rank)) for rank, leaf in enumerate(leaves)
        ]
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()  # it is connected
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        spans = [_answer(worker) for worker in workers]
        told: dict[str, Any] = _answer(server)
    seconds = max(span["end_s"] for span in spans) - min(span["start_s"] for span in spans)
    gbit = WORKERS * TIMES * MIB * 2**20 * 8 / 1e9
    costs = {
        "server_cpu_s": told["cpu_s"] / gbit,
        "workers_cpu_s": sum(span["cpu_s"] for span in spans) / gbit,
    }
    return told | costs | {"gbit_s": gbit / seconds}


@contextmanager
def _star() -> Iterator[tuple[netns.Namespace, list[netns.Namespace]]]:
    """A namespace in the middle and one for each worker, a veth to each."""
    made: list[netns.Namespace] = []
    try:
        hub = netns.make_namespace("h")
        made.append(hub)
        for rank in range(WORKERS):
            leaf = netns.make_namespace("w")
            made.append(leaf)
            link = ("ip", "-n", hub.name, "link", "add", f"w{rank}", "type", "veth")
            netns.run(*link, "peer", "name", "eth0", "netns", leaf.name)
            for end, dev, host in ((hub, f"w{rank}", 1), (leaf, "eth0", 2)):
                end.call(enable_gro, dev)
                netns.run(
                    "ip", "-n", end.name, "addr", "add", f"10.98.{rank}.{host}/24", "dev", dev
                )
                netns.run("ip", "-n", end.name, "link", "set", dev, "up")
        yield hub, made[1:]
    finally:
        for one in made:
            netns.remove(one.name)


def _start(where: netns.Namespace, *arguments: str) -> subprocess.Popen[str]:
    argv = (sys.executable, "-m", "bench.serving", *arguments)
    return where.popen(*argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _answer(process: subprocess.Popen[str]) -> Any:
    """What it says last, as JSON."""
    output, _ = process.communicate(timeout=120)
    return json.loads(output.splitlines()[-1])


def _serve(profiled: bool) -> None:
    from tlsched.shim.ps.listening import listen
    from tlsched.shim.ps.server import Server
    from tlsched.shim.ps.wire import key_of

    server = Server(listen(("0.0.0.0", PORT)), key_of(""), lambda _: None, jobs=1)
    _say("listening")
    before_s = time.process_time()
    profiler = cProfile.Profile()
    if profiled:
        profiler.runcall(server.serve)
    else:
        server.serve()
    cpu_s = time.process_time() - before_s
    text = io.StringIO()
    if profiled:
        stats = pstats.Stats(profiler, stream=text).strip_dirs()  # where it lies is nobody's matter
        stats.sort_stats("tottime").print_stats(_LINES)
    told = {
        "cpu_s": cpu_s,
        "server_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "profile": text.getvalue(),
    }
    _say(json.dumps(told))


def _push(host: str, rank: int) -> None:
    import torch

    from tlsched.shim.ps.client import Client
    from tlsched.shim.ps.connecting import Place
    from tlsched.shim.ps.exchange import Exchange
    from tlsched.shim.ps.wire import Hello, key_of

    torch.set_num_threads(1)
    hello = Hello(_JOB, key_of(""), rank, WORKERS, 0, LANE_COUNT)
    client = Client([Place("server", (host, PORT))], hello, [None] * LANE_COUNT)
    gradients = torch.ones(MIB * 2**18)
    _say("connected")
    sys.stdin.readline()
    start_s, before_s = time.monotonic(), time.process_time()
    for _ in range(TIMES):
        running = []
        for number, bucket in enumerate(gradients.chunk(BUCKETS)):
            running.append(Exchange(bucket, None))
            client.reduce(number * LANE_COUNT // BUCKETS, running[-1], 0, 4, hold=False)
        for exchange in running:
            exchange.wait(60)
    end_s, cpu_s = time.monotonic(), time.process_time() - before_s
    client.close(abort=False)
    _say(json.dumps({"start_s": start_s, "end_s": end_s, "cpu_s": cpu_s}))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2] == "1")
    else:
        _push(sys.argv[2], int(sys.argv[3]))
