"""Which sequences compute how many tokens in the next step, and which pages of the KV cache they use. Plain Python."""
