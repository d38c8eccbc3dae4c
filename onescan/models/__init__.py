"""Whole networks, and the presets that name every size in the papers."""
