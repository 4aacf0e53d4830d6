"""Where bytes live and how they move: budgets, buffers, device, host, disk, transfer lanes."""
