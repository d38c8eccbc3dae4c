"""Files of a run folder: atomic writes, weights with checksums, and config.json."""
