"""What a run's folder is made of: atomic writes, weights with checksums, config.json."""
