"""Parameter servers: a second way to sum the gradients of all workers.

Workers push segments of their gradients to servers, which sum them and send the sums back. Server
and wire need numpy only, so that a server starts quickly and stays small.
"""
