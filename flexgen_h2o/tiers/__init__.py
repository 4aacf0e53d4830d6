"""Places of bytes and how they move: budgets, buffers, device, host, disk, transfer lanes."""
