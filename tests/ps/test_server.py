"""A server as its workers see it, byte by byte."""

from __future__ import annotations

import resource
import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.ps.peers import Worker, hello, serving
from tests.training.serving import servers
from tlsched.bands import lane_bands
from tlsched.shim.ps.cutting import SEGMENT_BYTES
from tlsched.shim.ps.line import WINDOW
from tlsched.shim.ps.wire import HEAD, HELLO_BYTES, Head, Kind, Trouble, read_trouble

COUNT = SEGMENT_BYTES // 4


def _part(seed: int, count: int = 1000) -> bytes:
    return np.random.default_rng(seed).standard_normal(count, np.float32).tobytes()


def _sum(parts: list[bytes]) -> bytes:
    """In the order of the ranks."""
    total = np.frombuffer(parts[0], np.float32).copy()
    for part in parts[1:]:
        total += np.frombuffer(part, np.float32)
    return total.tobytes()


def test_sum_is_made_in_the_order_of_the_ranks_whoever_comes_first() -> None:
    parts = [_part(rank) for rank in range(4)]
    with serving() as served:
        workers = served.workers(4)
        for number, order in enumerate(((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1))):
            for rank in order:
                workers[rank].push(parts[rank], number=number)
            assert {worker.pull() for worker in workers} == {_sum(parts)}


def test_sum_of_a_segment_comes_back_before_the_next_is_sent() -> None:
    with serving() as served:
        first, second = served.workers(2)
        for number in range(3):
            for worker in (first, second):
                worker.push(_part(1), number=number)
            assert first.pull() == second.pull() == _sum([_part(1), _part(1)])


def test_held_sums_come_back_with_the_last_of_them() -> None:
    with serving() as served:
        workers = served.workers(2)
        for worker in workers:
            worker.push(_part(1), hold=1)
            worker.push(_part(2), hold=1)
        workers[0].sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            workers[0].pull()
        workers[0].sock.settimeout(10)
        for worker in workers:
            worker.push(_part(3))
        for worker in workers:
            assert [worker.pull() for _ in range(3)] == [
                _sum([_part(seed)] * 2) for seed in (1, 2, 3)
            ]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES), "it is no worker of tlsched's"),
        (hello(0, 1, token="wrong").pack(), "its token is not this server's"),
        (hello(0, 1, lane=0, lanes=99).pack(), "it asks for lane 0 of 99"),
        (hello(5, 2).pack(), "it says that it is rank 5 of 2"),
        (b"short", "it closed before it said who it is"),
    ],
)
def test_whoever_says_no_proper_hello_is_turned_away_and_told_why(sent: bytes, said: str) -> None:
    with serving(token="right") as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            told = b"".join(iter(lambda: sock.recv(4096), b""))  # until the server closes
        assert said in served.said[0]
        assert said in read_trouble(told[HEAD.size :]).text
        worker = Worker(served.port, hello(0, 1, token="right")).welcomed()
        worker.push(_part(1))
        assert worker.pull() == _part(1)


def test_second_connection_of_a_rank_is_turned_away_and_the_job_goes_on() -> None:
    with serving() as served:
        first, second = served.workers(2)
        again = Worker(served.port, hello(1, 2))
        assert again.trouble().text == "rank 1 has a connection for lane 0 already"
        for worker in (first, second):
            worker.push(_part(1))
        assert first.pull() == second.pull()


def test_workers_that_send_different_things_are_told_who_and_what() -> None:
    with serving() as served:
        workers = served.workers(3)
        workers[0].push(_part(1, 1000))
        time.sleep(0.2)
        workers[2].push(_part(1, 500))
        troubles = {worker.trouble() for worker in workers}
        assert troubles == {
            Trouble(
                "sent bytes 0 to 2000 of sum 0, 2000 bytes of type 0 where rank 0 sent "
                "bytes 0 to 4000 of sum 0, 4000 bytes of type 0",
                rank=2,
            )
        }


@pytest.mark.parametrize(
    "head",
    [
        Head(Kind.SEGMENT, 99, 0, 4, 0, 0, 4),
        Head(Kind.SEGMENT, 0, 0, 2 * SEGMENT_BYTES, 0, 0, 4),
        Head(Kind.SEGMENT, 0, 0, 3, 0, 0, 3),
        Head(Kind.SEGMENT, 0, 0, 0, 0, 0, 0),
        Head(77, 0, 0, 4, 0, 0, 4),
    ],
)
def test_record_that_no_worker_sends_ends_its_job_only(head: Head) -> None:
    with serving() as served:
        first, second = served.workers(2)
        first.sock.sendall(head.pack())
        assert first.trouble().rank == second.trouble().rank == 0
        for worker in (first, second):
            worker.sock.close()
        other = Worker(served.port, hello(0, 1)).welcomed()
        other.push(_part(1))
        assert other.pull() == _part(1)


def test_worker_that_leaves_without_goodbye_ends_the_job_for_all() -> None:
    with serving() as served:
        workers = served.workers(3)
        workers[1].sock.close()
        for rank in (0, 2):
            trouble = workers[rank].trouble()
            assert (trouble.rank, trouble.gone) == (1, True)


def test_goodbye_ends_the_job_only_for_those_who_wait_for_more() -> None:
    goodbye = Head(Kind.BYE, 0, 0, 0, 0, 0, 0).pack()
    with serving() as served:
        first, second = served.workers(2)
        for worker in (first, second):
            worker.push(_part(1))
        assert first.pull() == second.pull()
        second.sock.sendall(goodbye)
        second.sock.close()
        time.sleep(0.2)
        first.push(_part(2), number=1)
        trouble = first.trouble()
        assert (trouble.rank, trouble.gone) == (1, True)


def test_two_jobs_at_once_do_not_meet() -> None:
    with serving() as served:
        mine = served.workers(2)
        other = Worker(served.port, replace(hello(0, 1), job=b"b" * 16)).welcomed()
        other.push(_part(7))
        assert other.pull() == _part(7)
        for worker in mine:
            worker.push(_part(1))
        assert mine[0].pull() == mine[1].pull() == _sum([_part(1)] * 2)


def _push_on(worker: Worker, payload: bytes, sent: list[int]) -> None:
    for number in range(1000):
        worker.push(payload, number=number)
        sent.append(number)


def _exchange_on(first: Worker, second: Worker, payload: bytes) -> None:
    """``second`` never reads."""
    for number in range(1000):
        for worker in (first, second):
            worker.push(payload, number=number)
        first.pull()


def test_a_slow_worker_bounds_what_the_server_keeps() -> None:
    """Rank 0 sends much more than fits a window while rank 1 sends nothing."""
    payload = _part(1, COUNT)
    with serving() as served:
        first, second = served.workers(2)
        first.sock.settimeout(0.5)
        sent: list[int] = []
        with pytest.raises(TimeoutError):
            _push_on(first, payload, sent)
        (job,) = served.server.jobs
        assert job.pool.made <= 2 * WINDOW
        assert len(sent) * SEGMENT_BYTES < 200 * 2**20, "the sender was held up"
        second.push(payload)
        assert second.pull() == _sum([payload] * 2)


def test_a_worker_that_does_not_read_bounds_what_the_server_keeps() -> None:
    payload = _part(1, COUNT)
    with serving() as served:
        first, second = served.workers(2)
        second.sock.settimeout(0.5)
        first.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            _exchange_on(first, second, payload)
        (job,) = served.server.jobs
        assert job.pool.made <= 3 * WINDOW


def test_a_servers_resident_memory_is_bounded_while_a_worker_is_slow() -> None:
    payload, lanes = _part(1, COUNT), 6
    with servers(1) as (server,):
        port = int(server.address.rpartition(":")[2])
        workers = [
            Worker(port, hello(rank, 2, lane=lane, lanes=lanes)).welcomed()
            for rank in range(2)
            for lane in range(lanes)
        ]
        before = _resident_bytes(server.process.pid)
        for worker in workers[:lanes]:
            worker.sock.settimeout(0.2)
            with pytest.raises(TimeoutError):
                _push_on(worker, payload, [])
        grown = _resident_bytes(server.process.pid) - before
        assert grown <= (lanes * WINDOW + 4) * SEGMENT_BYTES
        assert grown >= lanes * WINDOW * SEGMENT_BYTES / 2, "nothing was sent"


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_both_ends_carry_the_marks_that_the_worker_asks_for() -> None:
    band = lane_bands()[2]
    asked = replace(hello(0, 1, lane=2, lanes=6), priority=band.priority, dscp=band.dscp)
    with serving() as served:
        worker = Worker(served.port, asked).welcomed()
        (job,) = served.server.jobs
        (member,) = job.members.values()
        assert member.sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == band.tos
        assert member.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == band.priority
        worker.push(_part(1))
        assert worker.pull() == _part(1)


def test_buffers_are_used_again() -> None:
    with serving() as served:
        workers = served.workers(2)
        for number in range(100):
            for worker in workers:
                worker.push(_part(1), number=number)
            for worker in workers:
                worker.pull()
        (job,) = served.server.jobs
        assert job.pool.made <= 4


def test_stopped_server_tells_why() -> None:
    with serving() as served:
        (worker,) = served.workers(1)
    assert worker.trouble().text == "it was stopped"


def test_idle_job_ends_when_all_have_said_goodbye() -> None:
    goodbye = Head(Kind.BYE, 0, 0, 0, 0, 0, 0).pack()
    with serving() as served:
        workers = served.workers(2)
        for worker in workers:
            worker.sock.sendall(goodbye)
            worker.sock.close()
        end_s = time.monotonic() + 5
        while served.server.jobs and time.monotonic() < end_s:
            time.sleep(0.01)
        assert not served.server.jobs
        assert served.said[-1].endswith("is over")
