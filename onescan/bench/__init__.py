"""Measuring: sizes, times, memory."""
