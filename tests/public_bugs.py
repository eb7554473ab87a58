"""Bugs that users of other servers reported in public, and the tests that show that this one does not have them."""

from __future__ import annotations

from dataclasses import dataclass

_CASES = "e2e/test_public_bugs.py::"
_SAID, _CHATTED, _REFUSED = (f"{_CASES}test_{name}" for name in ("said", "chatted", "refused"))
_REQUESTS = "engine/test_requests.py::test_"
_LAWS = "e2e/test_laws.py::test_"
_PRIORITY = "host/test_scheduler_priority.py::test_"
_LIFECYCLE = "e2e/test_server_lifecycle.py::test_"
_RANDOM = "e2e/test_random_requests.py::test_"
_TOOLS = "e2e/test_server_tools.py::test_"


@dataclass(frozen=True)
class PublicBug:
    """
    Attributes:
      source: where it was reported; numbers are of issues and pull requests.
      tests: functions, as `FILE::NAME` under tests/. Those named `test_said`, `test_chatted` and `test_refused` take their cases from
        `bug_cases`, where each has the number of its row here.
    """

    number: int
    source: str
    symptom: str
    tests: tuple[str, ...]


def _bug(number: int, source: str, symptom: str, *tests: str) -> PublicBug:
    return PublicBug(number, source, symptom, tests)


PUBLIC_BUGS = [
    _bug(1, "vllm 16529", "a logit_bias outside the vocabulary kills the engine", _REFUSED),
    _bug(2, "vllm 51795, 9634", "prompt ids outside the vocabulary are accepted", _REFUSED),
    _bug(3, "vllm 17313", "an invalid regular expression crashes the server", _REFUSED),
    _bug(4, "vllm 57725, TGI 2280", "a bad schema is a 500; one that refers to itself dies midway", _REFUSED,
         "host/test_constraint_compiler.py::test_a_schema_that_never_ends_goes_on"),
    _bug(5, "vllm 32006", "json_object with tool_choice required crashes the engine", _CHATTED,
         _TOOLS + "a_forced_call_is_one_that_can_be_read"),
    _bug(6, "vllm 10583, 15041, 27987", "the same request id twice hangs, crashes or spoils metrics",
         _CASES + "test_equal_request_ids", "e2e/test_server_endpoints.py::test_equal_request_ids_at_the_same_time"),
    _bug(7, "vllm 51654", "a JSON body that is no object is a 500", _CASES + "test_bodies_that_are_no_objects"),
    _bug(8, "vllm 49239", "a small body with many mistakes gets a huge answer",
         _CASES + "test_answers_to_long_lists_of_wrong_things_are_short",
         "e2e/test_server_errors.py::test_a_thousand_wrong_items_get_a_short_answer"),
    _bug(9, "vllm 6521, 2706", "echo with max_tokens 0 crashes", _CASES + "test_an_echo_is_the_prompt_and_its_tokens_are_its_text",
         "e2e/test_server_logprobs.py::test_an_echo_with_log_probabilities"),
    _bug(10, "vllm 9547", "blanks at the end of a message that goes on are refused", "e2e/test_server_fields.py::test_the_chat_prompt",
         "host/test_text_chat_template.py::test_a_continued_message_ends_the_prompt_exactly"),
    _bug(11, "vllm 53975", "a removed field is ignored and the output unconstrained", _REFUSED),
    _bug(12, "vllm 3572", "stop strings are looked for at the end of tokens only", _SAID),
    _bug(13, "vllm 3574, 2577", "a part of the stop string is streamed", _SAID),
    _bug(14, "llama.cpp 10914", "text is doubled with several stop strings", _SAID),
    _bug(15, "llama.cpp 11538", "a stop string of several tokens is ignored", _SAID),
    _bug(16, "vllm 13087, 11089", "empty chunks while text is held back", _SAID),
    _bug(17, "vllm 21987", "a stop string ends an answer before min_tokens", _SAID, _REQUESTS + "stop_strings_wait_for_min_tokens"),
    _bug(18, "vllm 2123", "a stop string that is a special token is never seen", _SAID),
    _bug(19, "vllm 17448", "bytes that are no text break the decoder", _SAID,
         _RANDOM + "whatever_is_asked_for_a_stream_says_what_a_whole_answer_says",
         "host/test_text_detokenizer.py::test_random_bytes_never_fail"),
    _bug(20, "exo 1691, vmlx 129", "emoji are streamed as replacement characters", _SAID),
    _bug(21, "vllm 42210", "a stop string within what may become a call loses text", _SAID, _CHATTED),
    _bug(22, "vllm 52599", "the stop string stays in the reasoning", _CHATTED),
    _bug(23, "vllm 8625, 7262", "wrong usage in streams", _CASES + "test_usage_of_a_stream"),
    _bug(24, "vllm 27300", "log-probabilities of parts of a character have no bytes", _CASES + "test_bytes_of_tokens_are_those_of_the_text"),
    _bug(25, "vllm 42019, 8268, 3251", "prompt_logprobs are wrong with a prefix cache",
         _REQUESTS + "log_probabilities_of_a_prompt_are_those_of_saying_it"),
    _bug(26, "vllm 5334", "echoed tokens and offsets are garbled", _CASES + "test_an_echo_is_the_prompt_and_its_tokens_are_its_text"),
    _bug(27, "sglang 1176", "alternatives are missing at random", _REQUESTS + "alternatives_are_never_missing"),
    _bug(28, "vllm 39734, 35541, sglang-jax 72", "a request larger than the cache blocks the queue for ever", _REFUSED,
         _PRIORITY + "a_cache_that_cannot_hold_the_longest_request_is_refused_at_once"),
    _bug(29, "vllm 40896, 5543, 54490", "the first answer differs from later ones with a prefix cache",
         _REQUESTS + "the_first_answer_is_like_all_later_ones"),
    _bug(30, "vllm 23347", "preemption by priority fails an assertion",
         _PRIORITY + "urgent_requests_overtake_preempted_ones_and_everybody_finishes"),
    _bug(31, "vllm 16832, vllm-gaudi 524", "recomputing after a preemption loses or doubles tokens",
         "engine/test_greedy_parity.py::test_after_preemption", _REQUESTS + "everybody_gets_what_they_would_get_alone"),
    _bug(32, "vllm 51226", "a seed is ignored beside a request that has none", _REQUESTS + "a_seed_holds_beside_those_that_have_none"),
    _bug(33, "vllm 5639, TGI 1765", "penalties leak to others or count padding", _REQUESTS + "everybody_gets_what_they_would_get_alone"),
    _bug(34, "tpu-inference 1524", "min_tokens and ignore_eos are ignored", _REQUESTS + "min_tokens_and_ignore_eos_hold_against_a_bias"),
    _bug(35, "vllm 46243", "min_tokens is off by one", _REQUESTS + "min_tokens_and_ignore_eos_hold_against_a_bias"),
    _bug(36, "vllm 4589, 5849", "ignore_eos and min_tokens forget further ends of the model", _REQUESTS + "every_end_of_the_model_is_meant"),
    _bug(37, "vllm 50767, 22519", "penalties and stop ids of the model's defaults are dropped",
         _REQUESTS + "the_models_defaults_hold_unless_something_is_sent"),
    _bug(38, "vllm 42474", "max_tokens is taken for a reservation", _CASES + "test_a_length_is_no_reservation",
         _REQUESTS + "a_length_is_no_reservation"),
    _bug(39, "vllm 22545, 29928", "gauges stay up after everything was aborted", _LAWS + "100_aborted_streams_leave_nothing_behind",
         "e2e/test_server_metrics.py::test_gauges_follow_the_scheduler_without_traffic"),
    _bug(40, "ATOM 1562, vllm 24584", "a whole answer goes on although its client has gone",
         _LIFECYCLE + "a_client_that_leaves_frees_everything_at_once"),
    _bug(41, "vllm 7633, 10024", "the engine is dead and the server says it is healthy", _LIFECYCLE + "a_dead_engine",
         "e2e/test_server_process.py::test_a_dying_engine_ends_the_process_and_says_why",
         "e2e/test_server_endpoints.py::test_deep_health_finds_an_engine_that_stands_still"),
    _bug(42, "vllm 6735, 9567, 23138, 51187", "greedy output depends on the batch size",
         _LAWS + "64_concurrent_ragged_requests_equal_the_same_requests_alone"),
    _bug(43, "vllm 17609, 17357, dynamo 8636", "without thinking content is null and calls are lost", _CHATTED),
    _bug(44, "vllm 22507", "reasoning is missed where the prompt opens it", _CHATTED),
    _bug(45, "vllm 32152, 22885, 19056", "the last brace of arguments is lost", _CHATTED, _TOOLS + "calls_are_read"),
    _bug(46, "vllm 21360, 10395", "a token that opens a list is dropped from arguments", _CHATTED),
    _bug(47, "vllm 38946, 44522, 53431", "Gemma's quotes are split, its calls begin without their name", _CHATTED),
    _bug(48, "vllm 25054, 53255", "finish_reason tool_calls without calls", _CHATTED),
    _bug(49, "vllm 9451", "parallel_tool_calls is ignored", _CHATTED),
    _bug(50, "vllm 9053", "a call that is cut says different things in the two modes", _CHATTED),
    _bug(51, "vllm 38717", "the benchmark's client dies of characters that come in pieces",
         "e2e/test_bench_serve.py::test_a_server_that_writes_byte_by_byte"),
    _bug(52, "vllm 28703", "one bad line of a batch aborts everything", "e2e/test_batch_cli.py::test_one_bad_line_is_one_error_line"),
    _bug(53, "sglang-jax 237", "the first request with log-probabilities breaks the server or compiles",
         _LAWS + "the_compile_counter_is_flat_over_200_random_shapes"),
    _bug(54, "tpu-inference 606, 898, vllm 14580", "compiled programs are not used again",
         "engine/test_second_start.py::test_a_second_start_finds_every_program",
         _LAWS + "the_compile_counter_is_flat_over_200_random_shapes"),
    _bug(55, "vllm 45414", "requests wait for ever while nothing runs", _PRIORITY + "nobody_waits_while_nothing_runs_whatever_comes_and_goes"),
]  # fmt: skip
