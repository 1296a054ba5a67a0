"""Pure thinking about order: no torch, no clock, no sockets."""
