"""From what a request asks its answer to look like to the constraint that makes it so.

A grammar comes from anybody, and the compiler is native code that no thread can be stopped in. So a grammar is compiled twice: first by
a process of its own (checker.py), which is ended when it takes too long, wants too much memory or dies; then, knowing that it is
harmless, here, with the model's vocabulary. The library bounds the work of every later step by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher

from tpu_serve.constraint.check_process import CheckFailed, CheckProcess, CheckTimeout
from tpu_serve.constraint.checker import limits
from tpu_serve.constraint.grammar import Grammar, short
from tpu_serve.constraint.lark import OPTIONS
from tpu_serve.constraint.source import lark_of
from tpu_serve.constraint.spec import GrammarSpec
from tpu_serve.constraint.vocabulary import GrammarVocabulary, special_tokens
from tpu_serve.request import Constraint, InvalidRequest
from tpu_serve.text.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "GrammarSpec"]

_log = logging.getLogger(__name__)

MAX_SECONDS = 10.0
NUM_WORKERS = 2
MAX_WAITING = 256
MAX_CACHED = 64


class GrammarCompiler:
    """Compiles for one model. Any thread may use it.

    A grammar that takes too long holds one of `num_workers` workers for at most `max_seconds`. Compiled grammars are kept, the
    `max_cached` used last, and copied for each request, which costs no compilation and waits for no worker.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        max_seconds: float = MAX_SECONDS,
        num_workers: int = NUM_WORKERS,
        max_cached: int = MAX_CACHED,
    ):
        """Does nothing that takes time: the vocabulary is made for the first grammar, or by `warm_up`.

        Args:
          vocab_size: rows of the embedding, at least as many as the tokenizer has ids.
          eos_token_ids: what ends an answer; all of them are allowed where a grammar ends.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self._max_seconds, self._max_cached = max_seconds, max_cached
        self._vocabulary: GrammarVocabulary | None = None
        self._vocabulary_lock, self._cache_lock = threading.Lock(), threading.Lock()
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._workers = ThreadPoolExecutor(num_workers, "grammar")
        self._num_waiting = 0
        self._idle: queue.LifoQueue[CheckProcess] = queue.LifoQueue()
        self._is_closed = False

    async def compile(self, spec: GrammarSpec, param: str) -> Constraint:
        """A constraint at the start of its grammar.

        Raises:
          InvalidRequest: it names `param`; reasons are `invalid_grammar`, `grammar_too_large`, `grammar_too_slow`, and, with
            status 503, `overloaded`.
        """
        key = spec.key(param)
        cached = self._cached(key)
        if cached is not None:
            return cached
        if self._num_waiting >= MAX_WAITING:
            raise InvalidRequest(
                param, f"{MAX_WAITING} grammars are waiting to be compiled. Try again later.", "overloaded", 503
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, self._compile, spec, key, param)
        finally:
            self._num_waiting -= 1

    def compile_now(self, spec: GrammarSpec, param: str) -> Constraint:
        """As `compile`, in the calling thread."""
        key = spec.key(param)
        return self._cached(key) or self._compile(spec, key, param)

    def recompile(self, source: str) -> Grammar:
        """A grammar of another compiler with the same vocabulary, which has found it harmless, in the calling thread.

        Args:
          source: see `Grammar`.

        Raises:
          InvalidRequest: it does not compile here.
        """
        key = f"compiled {source}"
        return self._cached(key) or self._keep(key, self._made(source, "grammar"))

    def warm_up(self) -> None:
        """Has the vocabulary made and a worker started, so that the first grammar need not wait. Returns at once."""
        with contextlib.suppress(RuntimeError):  # closed already
            self._workers.submit(self._warm_up)

    def close(self) -> None:
        """Ends the workers; requests that still wait are refused by their executor."""
        self._is_closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def _warm_up(self) -> None:
        try:
            self.compile_now(GrammarSpec("json_object"), "warm_up")
        except Exception:
            _log.exception("The compiler of grammars could not be warmed up.")

    def _cached(self, key: str) -> Grammar | None:
        with self._cache_lock:
            grammar = self._cache.get(key)
            if grammar is None:
                return None
            if grammar.is_spent:  # one that is compiled anew starts with nothing learnt
                del self._cache[key]
                return None
            self._cache.move_to_end(key)
            return grammar.copy()

    def _compile(self, spec: GrammarSpec, key: str, param: str) -> Grammar:
        cached = self._cached(key)  # made while this one waited
        if cached is not None:
            return cached
        source, translate = lark_of(spec, param)
        return self._keep(key, self._made(self._checked(source, translate, param), param))

    def _keep(self, key: str, grammar: Grammar) -> Grammar:
        """A copy of a grammar that is in the cache from now on."""
        with self._cache_lock:
            self._cache[key] = grammar
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
            return grammar.copy()

    def _checked(self, source: str, translate: bool, param: str) -> str:
        """The grammar in Lark, known to be harmless."""
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._new_process()
        try:
            answer = process.check(source, translate=translate, seconds=self._max_seconds)
        except CheckTimeout as error:
            raise InvalidRequest(
                param,
                f"{param} takes longer than {self._max_seconds:g} seconds to compile, the most allowed.",
                "grammar_too_slow",
            ) from error
        except CheckFailed as error:
            raise InvalidRequest(
                param, f"{param} is too complex: the compiler of grammars gave up.", "grammar_too_large"
            ) from error
        self._idle.put(process)
        if self._is_closed:
            self.close()
        if "error" in answer:
            raise _invalid(param, short(answer["error"]))
        return answer["grammar"]

    def _made(self, grammar: str, param: str) -> Grammar:
        vocabulary = self._get_vocabulary()
        matcher = LLMatcher(
            vocabulary.backend, LLMatcher.grammar_from_lark(grammar + OPTIONS), log_level=0, limits=limits()
        )
        if matcher.is_error():
            raise _invalid(param, short(matcher.get_error()))
        try:
            return Grammar(matcher, vocabulary, grammar)
        except ValueError as error:
            raise _invalid(param, str(error).rstrip(".")) from error

    def _get_vocabulary(self) -> GrammarVocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary

    def _new_process(self) -> CheckProcess:
        special = special_tokens(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return CheckProcess({"vocab_size": self._vocab_size, "special": special, "options": OPTIONS})


def _invalid(param: str, error: str) -> InvalidRequest:
    error = re.sub(r"^(at \d+\(\d+\): )?failed to compile JSON schema: ", "", error)
    return InvalidRequest(param, f"{param} cannot be compiled: {error}.", "invalid_grammar")
