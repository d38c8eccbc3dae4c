"""Modules with parameters: what models are put together from."""
