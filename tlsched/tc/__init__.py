"""The link: desired qdisc tree, its difference from what is there, and the kernel."""
