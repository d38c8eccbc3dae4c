"""Complete networks, and presets for every model size in the papers."""
