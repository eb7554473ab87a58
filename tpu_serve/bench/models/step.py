"""What a step is asked to do, and with it how often the loops of its program turn and which branches it takes."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.layers import attention, delta_rule

DECODE, PREFILL = "decode", "prefill"
DECODE_CONTEXT = 2048
"""Tokens that each sequence of a decode step sees, its own included."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, its bucket full. No request asks for more than the token that is sampled.

    Attributes:
      phase: "decode", as many sequences as tokens; "prefill", the first tokens of one sequence.
      num_tokens: of the bucket.
      context: tokens that the last token of each sequence sees, its own included.
    """

    phase: str
    num_tokens: int
    context: int

    @classmethod
    def of(cls, phase: str, num_tokens: int) -> Step:
        return cls(phase, num_tokens, DECODE_CONTEXT if phase == DECODE else num_tokens)

    @property
    def num_sequences(self) -> int:
        return self.num_tokens if self.phase == DECODE else 1

    def num_seen(self, window: int | None) -> int:
        """Pairs of a token and a key that it sees, over all tokens, in a layer with this window."""
        if self.phase == DECODE:
            return self.num_tokens * min(self.context, window or self.context)
        tokens, most = self.num_tokens, min(window or self.num_tokens, self.num_tokens)
        return most * (most + 1) // 2 + (tokens - most) * most

    def num_keys(self, window: int | None) -> int:
        """Cached tokens that must be read in a layer with this window, each once for its sequence."""
        if self.phase == DECODE:
            return self.num_seen(window)
        return self.num_tokens

    def turns(self, function: str, window: int | None) -> float | None:
        """How often a loop turns, on average over the turns of those around it; None where it is not known.

        Args:
          function: in which the loop was written, as its `__qualname__`.
          window: of the attention layer that is being walked.
        """
        decoding, tokens = self.phase == DECODE, self.num_tokens
        if function == "edit":
            return 0  # nobody asks for biases, masks or penalties
        if function == "paged_attention":
            return -(-tokens // attention.QUERY_BLOCK)
        if function == "_online_softmax":
            return self._blocks_of_keys(window)
        if function == "_single_tokens":
            return -(-tokens // delta_rule.ROW_BLOCK) if decoding else 0
        if function == "_chunks":
            return 0 if decoding else -(-tokens // delta_rule.CHUNK)
        if function == "_inverse":
            return (delta_rule.CHUNK - 1).bit_length() - 1
        if function == "convolve":
            return 0 if decoding else 1
        return None

    def _blocks_of_keys(self, window: int | None) -> float:
        """Of XLA's attention, for a block of queries."""
        width = attention.KV_BLOCK
        if self.phase == DECODE:
            first = 0 if window is None else max(self.context - window, 0) // width
            return -(-self.context // width) - first
        size = attention.QUERY_BLOCK
        counts = []
        for start in range(0, self.num_tokens, size):
            first = 0 if window is None else max(start + 1 - window, 0) // width
            counts.append(-(-min(start + size, self.num_tokens) // width) - first)
        return sum(counts) / len(counts)

    def branch(self, function: str) -> int:
        """Which branch a conditional takes that was written in a function: mostly that of a flag which nobody set."""
        if function.endswith("attend_block"):
            return int(self.phase == PREFILL)  # whether a block's queries are of one sequence
        return int(function == "_product")  # whether all values are finite
