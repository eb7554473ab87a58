"""Load for a running server and what came of it. Talks HTTP only: nothing here imports jax, so the devices stay the server's."""
