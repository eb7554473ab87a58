"""Chips, meshes, parameters and the data that crosses to the device."""
