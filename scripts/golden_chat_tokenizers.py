"""Small tokenizers with the control tokens of Qwen3.5, GPT-OSS, Gemma 3 and Gemma 4, for make_goldens.py."""

from __future__ import annotations

import json
from typing import Any

from golden_tokenizers import CHAT_TEMPLATE, MARKERS, SPACE, TEXT, TOKENIZER_CONFIG, TrainedTokenizer, byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

MARKED_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen3.5's rule for cutting text before merging: combining marks belong to the word."""
SEEN = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def train_marked_byte_level(vocab_size: int = 448) -> TrainedTokenizer:
    """Byte-level BPE as Qwen3.5's. The text model's own end is not the one that ends a turn."""
    tokenizer = byte_level(MARKED_SPLIT, vocab_size)
    tokenizer.normalizer = normalizers.NFC()
    for text in SEEN + MARKERS:
        tokenizer.add_tokens([AddedToken(text, special=text in SEEN, normalized=False)])
    end, im_end = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    template = CHAT_TEMPLATE.replace("{% endif %}{% endif %}", "{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}")
    return TrainedTokenizer(
        tokenizer,
        json.loads(TOKENIZER_CONFIG) | {"chat_template": template},
        {"eos_token_id": end},
        {"bos_token_id": end, "eos_token_id": [im_end, end], "pad_token_id": end},
    )


CASED_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The rule of o200k, GPT-OSS's vocabulary: a word ends where a capital follows a small letter, numbers come in threes."""
HARMONY = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
HARMONY_TEMPLATE = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{% elif message.role in ['system', 'developer'] %}"
    "{{ '<|start|>developer<|message|># Instructions\n\n' + message.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
HARMONY_CONFIG = """{
"bos_token": "<|startoftext|>", "clean_up_tokenization_spaces": false, "eos_token": "<|return|>",
"model_max_length": 512, "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"
}"""


def train_harmony(vocab_size: int = 448) -> TrainedTokenizer:
    """Byte-level BPE as GPT-OSS's: nothing is normalised, and an answer or a call of a function each has its own end."""
    tokenizer = byte_level(CASED_SPLIT, vocab_size)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in HARMONY])
    start, end, answer, call = map(
        tokenizer.token_to_id, ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>")
    )
    return TrainedTokenizer(
        tokenizer,
        json.loads(HARMONY_CONFIG) | {"chat_template": HARMONY_TEMPLATE},
        {"eos_token_id": answer, "pad_token_id": end},
        {"bos_token_id": start, "eos_token_id": [answer, end, call], "pad_token_id": end},
    )


FIRST = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
TURNS = ("<start_of_turn>", "<end_of_turn>")
PIPES = (
    *(
        "<|tool>",
        "<tool|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
        "<|think|>",
    ),
    *("<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|image|>", "<|audio|>", "<|video|>"),
)
GEMMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{{ message.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
GEMMA4_TEMPLATE = (
    "{{ bos_token }}{% set thinks = enable_thinking is defined and enable_thinking %}"
    "{% if thinks %}{{ '<|turn>system\\n<|think|>\\n<turn|>\\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{{ message.content | trim + '<turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}"
    "{% if not thinks %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}{% endif %}"
)
GEMMA_CONFIG = """{
"bos_token": "<bos>", "clean_up_tokenization_spaces": false, "eos_token": "<eos>", "model_max_length": 512,
"pad_token": "<pad>", "tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>"
}"""


def gemma(markers: tuple[str, ...], num_pieces: int) -> Tokenizer:
    """BPE with byte tokens for unknown characters that, unlike Mixtral's, puts no space before a text and takes none away.

    Args:
      markers: control tokens besides the first five.
      num_pieces: tokens of ordinary text.
    """
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", SPACE)
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=num_pieces, show_progress=False)
    learner.train_from_iterator([line for line in TEXT.splitlines() if line.isascii() or "Katze" in line], trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = [*FIRST, *markers, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    tokenizer = Tokenizer(
        models.BPE(
            {piece: token_id for token_id, piece in enumerate(pieces)},
            [tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [("<bos>", 2)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*FIRST, *markers)])
    return tokenizer


def trained_gemma(
    markers: tuple[str, ...], ends: tuple[str, ...], template: str, num_pieces: int, *, suppressed: tuple[str, ...] = ()
) -> TrainedTokenizer:
    tokenizer = gemma(markers, num_pieces)
    ids: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": [1, *map(tokenizer.token_to_id, ends)], "pad_token_id": 0}
    if suppressed:
        ids["suppress_tokens"] = [tokenizer.token_to_id(text) for text in suppressed]
    return TrainedTokenizer(
        tokenizer,
        json.loads(GEMMA_CONFIG) | {"chat_template": template},
        {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        ids,
    )


def train_gemma3(num_pieces: int = 230) -> TrainedTokenizer:
    return trained_gemma(TURNS, ("<end_of_turn>",), GEMMA3_TEMPLATE, num_pieces)


def train_gemma4(num_pieces: int = 230) -> TrainedTokenizer:
    """A turn may also end where the result of a tool is to follow."""
    ends = ("<turn|>", "<|tool_response>")
    return trained_gemma(PIPES, ends, GEMMA4_TEMPLATE, num_pieces, suppressed=("<|image|>", "<|audio|>"))
