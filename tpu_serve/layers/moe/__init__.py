"""The mixture-of-experts layer: routing and its backends."""
