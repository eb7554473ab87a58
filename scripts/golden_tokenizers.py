"""Small tokenizers for the fixtures that make_goldens.py writes, trained on a few lines of text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = """\
A mixture of experts keeps many small networks and asks only two of them about each word.
The router looks at the word, gives every expert a score, and sends the word to the best ones.
When the bus left the village it was still dark, and the driver hummed a song about the sea.
She bought bread, four lemons, and 250 grams of cheese; the change was 3.75 in coins.
"Have you seen my umbrella?" asked Tom. "It's behind the door," said Ana, "where you've left it."
def area(width, height):
    return width * height  # in square metres
{"city": "Lisbon", "degrees": 21, "sunny": true, "winds": [3, 5, 8]}
Die Katze schläft auf der warmen Fensterbank. Le train arrive à midi, près du vieux marché. Mañana lloverá un poco.
春天来了，花开了。 雨が降っています。 오늘은 바람이 불어요. Зима была долгой и тихой.
Weather: ☀️ 🌧️ 🌈 and a family 👩‍👩‍👧 on a tandem 🚲.
"""


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer with what the other files of its folder say about it.

    Attributes:
      backend: tokenizer.json.
      config: tokenizer_config.json.
      model_ids, generation_ids: the special token ids in config.json and generation_config.json.
    """

    backend: Tokenizer
    config: dict[str, Any]
    model_ids: dict[str, Any]
    generation_ids: dict[str, Any]

    @property
    def size(self) -> int:
        return self.backend.get_vocab_size()

    def is_text(self, token_id: int) -> bool:
        """Whether the id stands for ordinary text: it exists and was not added by name."""
        return token_id < self.size and token_id not in self.backend.get_added_tokens_decoder()


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's rule for cutting text before merging."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
TOKENIZER_CONFIG = """{
"bos_token": null, "clean_up_tokenization_spaces": false, "eos_token": "<|im_end|>", "model_max_length": 512,
"pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer", "unk_token": null
}"""


def byte_level(split: str, vocab_size: int, text: str = TEXT) -> Tokenizer:
    """Byte-level BPE over what `split` cuts, without any added token. Merges are those of `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def train_byte_level(vocab_size: int = 448, text: str = TEXT) -> TrainedTokenizer:
    """Byte-level BPE as Qwen's, `vocab_size` tokens before the added ones."""
    tokenizer = byte_level(SPLIT, vocab_size, text)
    tokenizer.normalizer = normalizers.NFC()
    for text in SPECIAL + MARKERS:  # after the merges, as in Qwen; the markers stay visible in decoded text
        tokenizer.add_tokens([AddedToken(text, special=text in SPECIAL, normalized=False)])
    end, im_end = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    return TrainedTokenizer(
        tokenizer,
        json.loads(TOKENIZER_CONFIG) | {"chat_template": CHAT_TEMPLATE},
        {"bos_token_id": end, "eos_token_id": im_end},
        {"bos_token_id": end, "eos_token_id": [im_end, end], "pad_token_id": end},
    )


SPACE = "\u2581"
"""What SentencePiece writes for a space."""
INSTRUCT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}"
    "{% else %}{{ raise_exception('Messages may be of the user or the assistant.') }}{% endif %}{% endfor %}"
)
INSTRUCT_CONFIG = """{
"add_bos_token": true, "add_eos_token": false, "bos_token": "<s>", "clean_up_tokenization_spaces": false,
"eos_token": "</s>", "legacy": true, "model_max_length": 512, "pad_token": null, "sp_model_kwargs": {},
"spaces_between_special_tokens": false, "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>",
"use_default_system_prompt": false
}"""


def train_byte_fallback(vocab_size: int = 500) -> TrainedTokenizer:
    """BPE as a converted SentencePiece model has it: words begin with a visible space, unknown characters become byte tokens.

    Every text gets a leading `<s>` when encoded and loses one leading space when decoded.
    """
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(fixed), show_progress=False)
    # Latin letters only: the rest, and line breaks, must go through the byte tokens.
    learner.train_from_iterator([line for line in TEXT.splitlines() if line.isascii() or "Katze" in line], trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = fixed + sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    tokenizer = Tokenizer(
        models.BPE(
            {piece: token_id for token_id, piece in enumerate(pieces)},
            [tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in fixed[:3]])
    return TrainedTokenizer(
        tokenizer,
        json.loads(INSTRUCT_CONFIG) | {"chat_template": INSTRUCT_TEMPLATE},
        {"bos_token_id": 1, "eos_token_id": 2},
        {"bos_token_id": 1, "eos_token_id": 2},
    )
