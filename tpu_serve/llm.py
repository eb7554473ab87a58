"""Offline generation: the same engine, driven from the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from tpu_serve.config import EngineConfig
from tpu_serve.constraint.compiler import GrammarCompiler
from tpu_serve.constraint.spec import GrammarSpec, Kind
from tpu_serve.engine.build import build_engine
from tpu_serve.engine.choice import Choice
from tpu_serve.request import (
    Constraint,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from tpu_serve.text.chat_template import ChatTemplate

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
"""A chat message: `{"role": …, "content": …}`."""
Form = Mapping[str, Any]
"""What an answer must look like, one of `{"json": schema}`, `{"json_object": True}`, `{"regex": pattern}`, `{"choice": [text, …]}`,
`{"grammar": Lark or GBNF}` and `{"structural_tag": …}`."""
_KINDS: Mapping[str, Kind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One answer to a prompt.

    Attributes:
      text: cut at a stop string.
      token_ids: of the answer, a final end-of-sequence token included.
      finish_reason: "stop", "length", or "error" when it could not be finished.
      stop_reason: the stop string or the stop token id that ended it; None for an end-of-sequence id.
      logprobs: one entry per token when asked for, else None.
      error: what went wrong, when finish_reason is "error".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything that came of one prompt.

    Attributes:
      prompt: as given; the rendered text for `LLM.chat`.
      prompt_token_ids: what the model saw.
      outputs: one per choice.
      num_cached_tokens: prompt tokens taken from the prefix cache.
      prompt_logprobs: an entry per prompt token, None for the first one; None when not asked for.
    """

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[ChoiceOutput, ...]
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LLM:
    """A model ready to generate. Not for use from several threads at once.

    Args:
      model: a Hugging Face folder or hub id; the embedded model when left out.
      options: any engine option by name, for example `max_model_len=4096` or `dtype="float32"`; `tpu-serve serve --help` lists them.

    Raises:
      ConfigError: an option does not exist or does not fit.
    """

    def __init__(self, model: str = "", **options: Any):
        self.engine = build_engine(EngineConfig.from_options(model=model, **options))
        self.tokenizer = self.engine.tokenizer
        self._template = ChatTemplate.load(self.tokenizer)
        self._num_requests = 0
        self._grammars: GrammarCompiler | None = None

    def default_params(self, **values: Any) -> SamplingParams:
        """Sampling parameters over the model's own defaults (generation_config.json)."""
        return self.engine.intake.params(**values)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_outputs: Form | Sequence[Form | None] | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts, all of them in one continuous batch.

        Args:
          prompts: one prompt or several; a text or a list of token ids each.
          params: for all prompts, or one per prompt; the model's defaults when left out.
          structured_outputs: what all answers must look like, or one form or None per prompt.
          priority: one per prompt, lower ones go first; needs `scheduling_policy="priority"`.
          use_tqdm: show a progress bar.

        Returns:
          One output per prompt, in order.

        Raises:
          InvalidRequest: a prompt or a parameter does not fit the model. Nothing has been generated then.
        """
        batch: list[Prompt] = [prompts] if _is_one_prompt(prompts) else list(prompts)  # type: ignore[arg-type,list-item]
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in batch]
        return self._run(batch, ids, params, structured_outputs, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_outputs: Form | Sequence[Form | None] | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several.

        Args:
          messages: a list of messages, or a list of such lists.
          params: for all conversations, or one per conversation; the model's defaults when left out.
          structured_outputs, priority, use_tqdm: as for `generate`.
          template_kwargs: handed to the chat template, for example `enable_thinking=False`.

        Raises:
          InvalidRequest: as for `generate`, or the model has no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("messages", "This model has no chat template.")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts: list[Prompt] = [self._template.render(conversation, **template_kwargs) for conversation in conversations]
        ids = [self.tokenizer.encode(str(text), add_special_tokens=False) for text in texts]
        return self._run(texts, ids, params, structured_outputs, priority, use_tqdm)

    def _constraint(self, form: Form | None) -> Constraint | None:
        if form is None:
            return None
        if len(form) != 1 or (name := next(iter(form))) not in _KINDS:
            raise InvalidRequest(
                "structured_outputs", f"structured_outputs must have exactly one of {', '.join(_KINDS)}, got {[*form]}."
            )
        if self._grammars is None:
            info = self.engine.info
            self._grammars = GrammarCompiler(self.tokenizer, info.vocab_size, info.eos_token_ids)
        return self._grammars.compile_now(GrammarSpec(_KINDS[name], form[name]), "structured_outputs")

    def _requests(
        self,
        ids: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        forms: Form | Sequence[Form | None] | None,
        priority: Sequence[int] | None,
    ) -> list[list[Request]]:
        """One list of choices per prompt."""
        count = len(ids)
        all_params = _spread("params", self.default_params() if params is None else params, count, SamplingParams)
        all_forms = _spread("structured_outputs", forms, count, Mapping)
        priorities = _spread("priority", 0 if priority is None else priority, count, int)
        groups = []
        for prompt_ids, one, form, order in zip(ids, all_params, all_forms, priorities, strict=True):
            self._num_requests += 1
            groups.append(
                self.engine.intake.requests(
                    f"offline-{self._num_requests}",
                    prompt_ids,
                    one,
                    constraint=self._constraint(form),
                    priority=order,
                )
            )
        return groups

    def _run(
        self,
        prompts: list[Prompt],
        ids: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        forms: Form | Sequence[Form | None] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        core = self.engine.core
        groups = [
            [_Collector(Choice(request, self.tokenizer)) for request in requests]
            for requests in self._requests(ids, params, forms, priority)
        ]
        collectors = {collector.choice.request.id: collector for group in groups for collector in group}
        try:
            for collector in collectors.values():
                core.add(collector.choice.request)
            with tqdm(total=len(collectors), unit="answer", disable=not use_tqdm) as bar:
                while collectors or core.has_work:  # the last step launched is collected too
                    for output in core.step():
                        if output.request_id not in collectors:
                            continue  # ended at a stop string while this step ran
                        collector = collectors[output.request_id]
                        collector.feed(output)
                        if collector.choice.finish_reason is not None:
                            del collectors[output.request_id]
                            core.abort(output.request_id, FinishReason.STOP)
                            bar.update()
        except BaseException:
            # An interrupt, say: the step that it cut short cannot be mended, so the next call starts afresh.
            core.reset()
            raise
        return [
            RequestOutput(
                prompt,
                group[0].choice.request.prompt_token_ids,
                tuple(collector.output() for collector in group),
                group[0].choice.num_cached_tokens,
                group[0].prompt_logprobs,
            )
            for prompt, group in zip(prompts, groups, strict=True)
        ]


class _Collector:
    """Joins the deltas of one choice."""

    def __init__(self, choice: Choice):
        self.choice = choice
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if choice.request.params.logprobs is None else []
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def feed(self, output: TokenOutput) -> None:
        delta = self.choice.feed(output)
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        if self._logprobs is not None:
            self._logprobs.extend(delta.logprobs or ())
        self._stop_reason, self._error = delta.stop_reason, delta.error
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs

    def output(self) -> ChoiceOutput:
        assert self.choice.finish_reason is not None
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        return ChoiceOutput(
            "".join(self._text),
            tuple(self._token_ids),
            self.choice.finish_reason,
            self._stop_reason,
            logprobs,
            self._error,
        )


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and hasattr(prompts[0], "__index__"))


def _spread(param: str, value: Any, count: int, kind: type) -> list[Any]:
    """A value for each prompt: one for all, or as many as there are prompts."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if len(value) != count:
        what = {"params": "sampling parameters", "priority": "priorities"}.get(param, param)
        raise InvalidRequest(param, f"{len(value)} {what} for {count} prompts.")
    return list(value)
