"""Which tests show that something is served: docs/support.md is made of this (scripts/make_support_matrix.py).

Tests are named as `FILE::NAME` under tests/, or by the file alone. A test checks that they exist and speak of what they stand for.
"""

from __future__ import annotations

ANSWERS = "e2e/test_server_answers.py::test_"
BUGS = "e2e/test_public_bugs.py::test_"
ENDPOINTS_FILE = "e2e/test_server_endpoints.py::test_"
FIELDS_FILE = "e2e/test_server_fields.py::test_"
GENERATION = "e2e/test_server_generation.py::test_"
LIFECYCLE = "e2e/test_server_lifecycle.py::test_"
LOGPROBS = "e2e/test_server_logprobs.py::test_"
REASONING = "e2e/test_server_reasoning.py::test_"
REQUESTS = "engine/test_requests.py::test_"
RESPONSES = "e2e/test_server_responses.py::test_"
RESPONSE_REQUESTS = "e2e/test_server_responses_requests.py::test_"
SMALL = "e2e/test_server_small_fields.py::test_"
STATE = "engine/test_sampling_state.py::test_every_option_with_strangers_and_preemptions"
TOOLS = "e2e/test_server_tools.py::test_"

ENDPOINTS: dict[str, tuple[str, ...]] = {
    "POST /v1/chat/completions": (
        "e2e/test_server_client.py::test_chat",
        "e2e/test_laws.py::test_streaming_equals_not_streaming",
    ),
    "POST /v1/completions": (
        "e2e/test_server_client.py::test_completions",
        ANSWERS + "a_stream_says_what_a_whole_answer_says",
    ),
    "POST /v1/responses": (RESPONSES + "whole_responses_and_streams_say_the_same", RESPONSES + "the_openai_client"),
    "POST /invocations": (ENDPOINTS_FILE + "invocations_are_what_their_body_is",),
    "POST /tokenize": (FIELDS_FILE + "tokenize_and_detokenize",),
    "POST /detokenize": (FIELDS_FILE + "tokenize_and_detokenize",),
    "GET /v1/models": ("e2e/test_server_client.py::test_models", LIFECYCLE + "when_ready"),
    "GET /v1/models/{id}": (
        "e2e/test_server_errors.py::test_an_unknown_model_is_a_404_with_the_nearest_name",
        LIFECYCLE + "when_ready",
    ),
    "GET /health": (LIFECYCLE + "while_loading", LIFECYCLE + "a_dead_engine"),
    "GET /ping": (LIFECYCLE + "when_ready",),
    "POST /ping": (LIFECYCLE + "when_ready",),
    "GET /health_generate": (ENDPOINTS_FILE + "deep_health_generates_a_token",),
    "GET /version": (LIFECYCLE + "when_ready",),
    "GET /load": (LIFECYCLE + "a_client_that_leaves_frees_everything_at_once",),
    "GET /server_info": (ENDPOINTS_FILE + "server_info_says_everything_but_secrets",),
    "GET /metrics": ("e2e/test_server_metrics.py::test_ten_requests_of_ten_tokens",),
    "POST /reset_prefix_cache": (ENDPOINTS_FILE + "the_prefix_cache_is_emptied",),
    "GET /tokenizer_info": (ENDPOINTS_FILE + "tokenizer_info",),
    "POST /start_profile": (ENDPOINTS_FILE + "traces_are_taken_one_at_a_time",),
    "POST /stop_profile": (ENDPOINTS_FILE + "traces_are_taken_one_at_a_time",),
}

FIELDS: dict[str, tuple[str, ...]] = {
    # prompts
    "prompt": (ANSWERS + "several_prompts_with_several_choices",),
    "messages": (FIELDS_FILE + "the_chat_prompt",),
    "input": (RESPONSE_REQUESTS + "items_become_the_messages_of_a_chat",),
    "instructions": (RESPONSE_REQUESTS + "items_become_the_messages_of_a_chat",),
    "add_special_tokens": (SMALL + "special_tokens_around_a_text_can_be_left_out",),
    "add_generation_prompt": (FIELDS_FILE + "the_chat_prompt",),
    "continue_final_message": (FIELDS_FILE + "the_chat_prompt",),
    "documents": (FIELDS_FILE + "the_chat_prompt",),
    "chat_template": (REASONING + "a_request_may_bring_a_template_where_it_is_trusted",),
    "chat_template_kwargs": (FIELDS_FILE + "the_chat_prompt", REASONING + "variables_of_the_template"),
    "truncate_prompt_tokens": (FIELDS_FILE + "prompts_are_truncated_on_the_asked_side",),
    "truncation_side": (FIELDS_FILE + "prompts_are_truncated_on_the_asked_side",),
    "truncation": (RESPONSE_REQUESTS + "the_oldest_turns_of_an_input_that_is_too_long_are_dropped_when_asked",),
    "cache_salt": (ANSWERS + "cached_prompt_tokens_are_reported",),
    "tokens": (FIELDS_FILE + "tokenize_and_detokenize",),
    "return_token_strs": (FIELDS_FILE + "tokenize_and_detokenize",),
    # sampling
    "temperature": ("device/test_sampler.py::test_frequencies_follow_the_distribution", STATE),
    "top_p": ("device/test_sampler.py::test_filters_keep_what_sorting_keeps", STATE),
    "top_k": ("device/test_sampler.py::test_filters_keep_what_sorting_keeps", STATE),
    "min_p": ("device/test_sampler.py::test_filters_keep_what_sorting_keeps", STATE),
    "seed": ("e2e/test_laws.py::test_a_seed_gives_the_same_tokens_whatever_the_neighbours",),
    "presence_penalty": ("device/test_sampler_edits.py", REQUESTS + "everybody_gets_what_they_would_get_alone"),
    "frequency_penalty": ("device/test_sampler_edits.py", REQUESTS + "everybody_gets_what_they_would_get_alone"),
    "repetition_penalty": ("device/test_sampler_edits.py", REQUESTS + "everybody_gets_what_they_would_get_alone"),
    "logit_bias": (REQUESTS + "min_tokens_and_ignore_eos_hold_against_a_bias",),
    "bad_words": (REQUESTS + "bad_words_are_not_said",),
    "allowed_token_ids": (REQUESTS + "only_allowed_ids_are_said",),
    "structured_outputs": (GENERATION + "an_answer_has_the_form_that_was_asked_for", "engine/test_structured.py"),
    "response_format": (GENERATION + "an_answer_has_the_form_that_was_asked_for",),
    "text": (RESPONSES + "the_text_may_have_a_form",),
    "priority": (GENERATION + "priorities", REQUESTS + "priorities_offline"),
    # endings
    "max_tokens": (FIELDS_FILE + "lengths_are_clipped_to_the_context",),
    "max_completion_tokens": (FIELDS_FILE + "lengths_are_clipped_to_the_context",),
    "max_output_tokens": (RESPONSES + "a_response_repeats_what_was_asked_and_counts_tokens",),
    "min_tokens": (REQUESTS + "min_tokens_and_ignore_eos_hold_against_a_bias", REQUESTS + "stop_strings_wait_for_min_tokens"),
    "stop": (BUGS + "said", "host/test_text_detokenizer.py::test_stop_strings_cut_where_brute_force_does"),
    "stop_token_ids": (ANSWERS + "a_stream_says_what_a_whole_answer_says",),
    "include_stop_str_in_output": (ANSWERS + "a_stream_says_what_a_whole_answer_says",),
    "ignore_eos": (REQUESTS + "every_end_of_the_model_is_meant",),
    # answers
    "model": ("e2e/test_server_errors.py::test_an_unknown_model_is_a_404_with_the_nearest_name",),
    "n": (ANSWERS + "several_prompts_with_several_choices", SMALL + "several_greedy_choices_are_the_same"),
    "best_of": (SMALL + "as_many_as_n_are_the_best",),
    "stream": (ANSWERS + "a_stream_says_what_a_whole_answer_says",),
    "stream_options": (ANSWERS + "usage_on_every_chunk_is_cumulative", BUGS + "usage_of_a_stream"),
    "echo": (FIELDS_FILE + "echo", LOGPROBS + "an_echo_with_log_probabilities"),
    "logprobs": (ANSWERS + "log_probabilities", "engine/test_completion_scores.py"),
    "top_logprobs": (ANSWERS + "log_probabilities", RESPONSES + "log_probabilities_are_those_of_the_text"),
    "include": (RESPONSES + "log_probabilities_are_those_of_the_text", RESPONSE_REQUESTS + "refusals_name_the_field_as_it_was_sent"),
    "prompt_logprobs": (LOGPROBS + "prompt_logprobs", REQUESTS + "log_probabilities_of_a_prompt_are_those_of_saying_it"),
    "return_token_ids": (ANSWERS + "a_stream_says_what_a_whole_answer_says",),
    "return_tokens_as_token_ids": (LOGPROBS + "tokens_by_their_ids",),
    "return_prompt_text": (REASONING + "the_prompt_can_be_shown",),
    "skip_special_tokens": (ANSWERS + "a_stream_says_what_a_whole_answer_says",),
    "spaces_between_special_tokens": (SMALL + "there_are_no_spaces_between_special_tokens",),
    "request_id": (FIELDS_FILE + "ids_are_the_clients_own_and_may_be_used_twice",),
    "scripted_token_ids": (GENERATION + "scripted_output",),
    "metadata": (RESPONSES + "a_response_repeats_what_was_asked_and_counts_tokens",),
    "store": (RESPONSES + "nothing_can_be_looked_up",),
    # tools and reasoning
    "tools": (TOOLS + "calls_are_read", BUGS + "chatted"),
    "tool_choice": (TOOLS + "a_forced_call_is_one_that_can_be_read",),
    "parallel_tool_calls": (TOOLS + "calls_are_read",),
    "max_tool_calls": (RESPONSES + "a_response_repeats_what_was_asked_and_counts_tokens",),
    "reasoning": (RESPONSES + "a_response_repeats_what_was_asked_and_counts_tokens",),
    "reasoning_effort": (REASONING + "reasoning_is_told_from_the_answer",),
    "include_reasoning": (REASONING + "reasoning_is_told_from_the_answer",),
    "thinking_token_budget": (REASONING + "a_budget_ends_reasoning",),
}  # fmt: skip

MODELS: dict[str, str] = {
    "gemma3": "models/test_gemma3.py",
    "gemma3_text": "models/test_gemma3.py",
    "gemma4": "models/test_gemma4.py",
    "gemma4_text": "models/test_gemma4.py",
    "gpt_oss": "models/test_gpt_oss.py",
    "mixtral": "models/test_mixtral.py",
    "qwen2_moe": "models/test_qwen2_moe.py",
    "qwen3": "models/test_qwen3.py",
    "qwen3_5_moe": "models/test_qwen3_5_moe.py",
    "qwen3_5_moe_text": "models/test_qwen3_5_moe.py",
    "qwen3_moe": "models/test_qwen3_moe.py",
    "qwen3_next": "models/test_qwen3_next.py",
}
