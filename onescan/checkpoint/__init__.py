"""Files of a run folder: atomic writes, weights with checksums, config.json, generation states."""
