"""What every room uses: configuration, packing, files, errors, units, the timeline."""
