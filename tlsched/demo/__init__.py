"""The demonstration: DDP and tlsched side by side on an emulated cluster."""
