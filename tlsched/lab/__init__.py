"""An emulated cluster of hosts in network namespaces on one machine (the *lab*).

::

    with Lab(hosts=4, rate_bps=1_000_000_000) as lab:
        process = lab.popen(0, ["iperf3", "-s", "-1"])

A link, seen from host *i* (its namespace is ``tlsched-NAME-hI``)::

    programs -> eth0 -> nic0 [rate, FIFO] ====== portI [rate, FIFO] <- bridge
                macvlan  veth, host's namespace   veth, the switch's namespace

``nic0`` stands for the network card: a plain FIFO that sends at the link's rate. ``eth0`` lies
above it in the same namespace and is free, so `tlsched attach --iface eth0` works here exactly as
on a real host, and `tlsched detach` leaves the plain FIFO of the same rate. ``portI`` is the
switch's port towards the host: the same rate, a FIFO of its own. The machine's first network
namespace holds no interface, address or qdisc of a lab; it only allows cubic to the hosts
(congestion.py).

Where tlsched is attached with the link's rate, the queue stands at ``eth0``, in its bands, and
``nic0`` stays empty: its token bucket (6 ms of the rate) is larger than a tree's, so it passes
what the tree releases. Programs that are not scheduled queue at ``nic0``, still within their own
host, so TCP's small queues (``tcp_limit_output_bytes``) hold them back there as on a real card.

Queues hold 10 ms of the rate, at least 256 KiB. They are bounded in bytes, so that a SYN or an
acknowledgement still fits where a GSO packet of 64 KiB does not: new connections open within the
queue's delay, and several hosts that send to one fill its link without starving one another.
"""

from tlsched.lab.cluster import Lab, remove_orphans
from tlsched.lab.topology import Host

__all__ = ["Host", "Lab", "remove_orphans"]
