"""What every room uses: configuration, packing, files, errors, units, the schedule and its timeline."""
