"""The tpu-serve command."""
