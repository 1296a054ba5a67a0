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
namespace holds no interface, address or qdisc of a lab.
"""

from tlsched.lab.cluster import Lab
from tlsched.lab.topology import Host

__all__ = ["Host", "Lab"]
