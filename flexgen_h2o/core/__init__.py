"""Parts that all other packages use: configuration, packing, files, errors, units, timeline."""
