"""One worker on a host of its own, which starts a server there; tells as JSON what it saw."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tlsched
from tests.training import faulty, models
from tlsched.errors import CommunicationError


def main(dies: bool) -> None:
    """Train; ``dies`` in the fault step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = faulty.deep_net()
    optimizer = models.OPTIMIZERS["sgd"](net)
    told: dict[str, Any] = {"error": ""}
    try:
        with tlsched.schedule(net, optimizer, backend="ps", timeout_s=20.0) as run:
            session = run._lanes[0].session  # type: ignore[attr-defined]  # a ServedLane
            told["servers"] = [place.address[0] for place in session.client.places]
            told["child"] = session.child.pid
            for step, batch in enumerate(models.batches("mlp", rank, faulty.STEPS)):
                if dies and step == faulty.FAULT_STEP:
                    _say(told)
                    os.kill(os.getpid(), signal.SIGKILL)
                faulty.step(net, optimizer, batch)
    except CommunicationError as error:
        told["error"] = str(error)
    told["sum"] = float(sum(p.double().sum() for p in models.parameters(net)))
    _say(told)


def _say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def gone(pid: int) -> bool:
    """Whether the process has ended."""
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


if __name__ == "__main__":
    main(sys.argv[1] == "dies")
