"""Conversations as rows of tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from text import Conversation, conversation, plain

from tpu_serve.text.chat_template import ChatTemplate
from tpu_serve.text.tokenizer import Tokenizer

ROW, NUM_ROWS = 256, 16
"""Tokens of a row, and rows of a step."""
PROMPT_WEIGHT = 0.1
"""In the loss, of tokens that the model never writes."""


class Rows:
    """Conversations one after another, as rows of `ROW` + 1 tokens with a weight for each that is predicted."""

    def __init__(self, folder: Path):
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(self._tokenizer)
        self._stop, self._end = (self._tokenizer.token_id(text) for text in ("<|im_end|>", "<|endoftext|>"))
        self._opening = self._tokenizer.encode("<|im_start|>assistant\n")

    def take(self, seed: int, plain_share: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """i32[NUM_ROWS, ROW + 1] tokens and f32[NUM_ROWS, ROW] weights; the same for the same arguments.

        Args:
          plain_share: of documents that are plain text rather than a conversation.
        """
        drawn = random.Random(seed)
        tokens, weights = np.zeros((NUM_ROWS, ROW + 1), np.int32), np.zeros((NUM_ROWS, ROW), np.float32)
        for row in range(NUM_ROWS):
            ids: list[int] = []  # each row begins with a conversation, so nothing is asked about what lies before it
            marks: list[float] = []
            while len(ids) < ROW + 1:
                if plain_share and drawn.random() < plain_share:
                    document = [*self._tokenizer.encode(plain(drawn)), self._end]
                    marks += [1.0] * len(document)
                else:
                    document = self._ids(conversation(drawn))
                    marks += self._marks(document)
                ids += document
            tokens[row], weights[row] = ids[: ROW + 1], marks[1 : ROW + 1]
        return tokens, weights

    def _ids(self, chat: Conversation) -> list[int]:
        messages = list(chat.messages)
        options: dict[str, Any] = {"tools": list(chat.tools)} if chat.tools else {}
        text = self._template.render(messages, add_generation_prompt=False, **options)
        if not chat.thinks:  # the template opens the last answer with an empty thought
            *before, _ = messages
            plain = self._template.render(before, add_generation_prompt=True, **options)
            closed = self._template.render(before, add_generation_prompt=True, enable_thinking=False, **options)
            text = closed + text.removeprefix(plain)
        return [*self._tokenizer.encode(text), self._end]

    def _marks(self, ids: list[int]) -> list[float]:
        """1 for tokens of answers, their end included, and `PROMPT_WEIGHT` for the others."""
        marks, is_answer, size = [PROMPT_WEIGHT] * len(ids), False, len(self._opening)
        for place, token_id in enumerate(ids):
            if is_answer:
                marks[place] = 1.0
                is_answer = token_id != self._stop
            else:
                is_answer = ids[place + 1 - size : place + 1] == self._opening
        return marks
