"""Tile sizes per chip, kernel and token count."""
