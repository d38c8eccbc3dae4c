"""Modules with parameters, from which models are built."""
