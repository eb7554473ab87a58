"""The step loop and how to reach it."""
