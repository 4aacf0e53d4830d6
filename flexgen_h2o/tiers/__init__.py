"""Where bytes are kept and how they move: budgets, buffers, device, host, disk, transfer lanes."""
