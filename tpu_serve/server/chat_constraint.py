"""What the tokens of a chat answer are held to: forced calls, a form, and where reasoning ends."""

from __future__ import annotations

from tpu_serve.constraint.both import combine
from tpu_serve.constraint.reasoning import AfterReasoning, ThinkingBudget
from tpu_serve.constraint.tools import forced_calls
from tpu_serve.constraint.unless import UnlessStartedWith
from tpu_serve.parsing.formats import HARMONY
from tpu_serve.parsing.registry import name_of
from tpu_serve.request import Constraint, InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import unsupported
from tpu_serve.server.protocol import ChatCompletionRequest
from tpu_serve.server.sampling import constraint_of
from tpu_serve.server.service import Service
from tpu_serve.server.tools import ToolUse


async def chat_constraint(
    service: Service, request: ChatCompletionRequest, use: ToolUse, prompt: str
) -> Constraint | None:
    """
    Args:
      prompt: the prompt's text, which may have begun to reason or have said that there is no reasoning.

    Raises:
      InvalidRequest: the request asks for a form that is not known, or for a budget that the model cannot have.
    """
    thought = _Thought(service, prompt, reads_calls=use.reads_calls)
    budget = _budget(request, thought)
    if use.is_forced:
        # Whatever form the content is to have, a forced call leaves no content.
        form = name_of(service.formats.calls)
        spec = forced_calls(form, use.forced_tools, service.tokenizer, parallel=not use.keeps_one)
        calls = await service.grammars.compile(spec, "tools")
        # Harmony's grammar has the reasoning in it, for a call has a header of its own.
        return combine(calls if form == HARMONY else thought.before(calls), budget)
    form_constraint = await constraint_of(service, request)
    if form_constraint is None:
        return budget
    if use.reads_calls and service.formats.calls is not None:
        start = service.formats.calls.start
        start_id = service.tokenizer.token_id(start) if start else None
        if start_id is not None:
            form_constraint = UnlessStartedWith(form_constraint, start_id, vocab_size=service.info.vocab_size)
    return combine(thought.before(form_constraint), budget)


class _Thought:
    """The reasoning that precedes an answer, as constraints need it."""

    def __init__(self, service: Service, prompt: str, *, reads_calls: bool):
        self._service, self._format, self._reads_calls = service, service.formats.reasoning, reads_calls
        if self._format is None:
            return
        written = service.formats.prompt_end(prompt)
        # A parser that has read nothing does not know yet.
        is_open_by_itself = self._format.is_always_open and not written.strip()
        self._is_open = is_open_by_itself or service.formats.parser(prompt=prompt).is_reasoning
        self._is_over = not self._is_open and self._format.end in written
        self._start = self._ids(self._format.start)

    @property
    def is_possible(self) -> bool:
        return self._format is not None and not self._is_over

    def before(self, constraint: Constraint) -> Constraint:
        """The constraint, from where reasoning is over."""
        if self._format is None or self._is_over:
            return constraint
        info, calls = self._service.info, self._service.formats.calls
        never = set(info.eos_token_ids)
        start_id = self._service.tokenizer.token_id(calls.start) if calls is not None and self._reads_calls else None
        if start_id is not None:
            never.add(
                start_id
            )  # a call in the middle of a thought would be one for the parser, but not for the constraint
        return AfterReasoning(
            constraint,
            self._ids(self._format.end),
            vocab_size=info.vocab_size,
            eos_token_ids=[token_id for token_id in never if token_id < info.vocab_size],
            start_ids=() if self._is_open else self._start,
        )

    def limited(self, num_tokens: int) -> Constraint:
        assert self._format is not None
        return ThinkingBudget(
            num_tokens,
            self._ids(self._format.thought_end),
            self._is_open,
            vocab_size=self._service.info.vocab_size,
            start_ids=self._start,
        )

    def _ids(self, text: str) -> list[int]:
        return self._service.tokenizer.encode(text, add_special_tokens=False)


def _budget(request: ChatCompletionRequest, thought: _Thought) -> Constraint | None:
    num_tokens = request.thinking_token_budget
    if num_tokens is None or num_tokens == -1:
        return None
    if num_tokens < 0:
        raise InvalidRequest(
            "thinking_token_budget",
            f"thinking_token_budget must be 0 or more, or -1 for no limit, got {show(num_tokens)}.",
        )
    if thought._format is None:
        hint = (
            "how this model writes reasoning is not known, so start the server with --reasoning-parser, or leave it out"
        )
        raise unsupported("thinking_token_budget", num_tokens, hint)
    return thought.limited(num_tokens) if thought.is_possible else None
