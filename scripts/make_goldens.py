"""Writes the tiny Qwen3-MoE checkpoints under tests/fixtures and the values that transformers computes from them.

Run by hand after `pip install -e .[golden]`: `python scripts/make_goldens.py`. Needs no network. A fixture folder holds:

  config.json, generation_config.json, tokenizer.json, tokenizer_config.json, model.safetensors (bf16)    as published models do
  v5_style/config.json    the same configuration as transformers 5 writes it
  manifest.json           versions, seed, margins, prompt texts
  golden.npz              float32 results from the bf16 weights. For each prompt p of 0, 1, 2:
    prompt_p [T] token ids · logits_p [T, V] · greedy_p [N] the greedy continuation · greedy_gap_p [N] between its two best logits
    top5_ids_p, top5_logprobs_p [N, 5] the best tokens of each greedy step
    and for prompt 0: hidden_0 [L + 1, T, H] (after the embedding, after each layer but the last, after the final norm),
    router_ids_0, router_weights_0 [MoE layers, T, K]

Weights are random, with a scale at which each of them matters: a wrong one moves the logits by far more than rounding does. The
seed is the first one where no choice (of an expert, of a greedy token) hangs on rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import zlib
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
NUM_GREEDY = 24
MIN_ROUTER_GAP, MIN_ARGMAX_GAP = 1e-3, 5e-3
MIN_DISTINCT = 12
"""Fewest different tokens in all greedy continuations: one token for ever would prove little."""

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
PROMPTS = (
    "The router looks",
    "A train leaves at 7:45 and needs 90 minutes. When does it arrive? Answer in one line.\n",
    'Translate: "Die Katze schläft." 花が咲く 🌈. Then write a function that adds 12 and 30:\ndef add(a, b):\n    return a + b\n'
    "Finally, describe the weather in Lisbon, where the sun has been out for three days.",
)
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


def train_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    for text in SPECIAL + MARKERS:  # after the merges, as in Qwen; the markers stay visible in decoded text
        tokenizer.add_tokens([AddedToken(text, special=text in SPECIAL, normalized=False)])
    return tokenizer


BASE_CONFIG = """{
"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "decoder_sparse_step": 1,
"head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
"max_position_embeddings": 512, "max_window_layers": 3, "mlp_only_layers": [], "model_type": "qwen3_moe",
"moe_intermediate_size": 32, "norm_topk_prob": true, "num_attention_heads": 8, "num_experts": 8,
"num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 2, "output_router_logits": false,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
"sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
"use_cache": true, "use_sliding_window": false
}"""
"""The config.json of a published Qwen3-MoE, with small sizes."""
TOKENIZER_CONFIG = """{
"bos_token": null, "clean_up_tokenization_spaces": false, "eos_token": "<|im_end|>", "model_max_length": 512,
"pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer", "unk_token": null
}"""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
TIED = {
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "mlp_only_layers": [1],
    "rope_theta": 1e4,
    "rope_scaling": YARN,
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: what differs in config.json, the sampling part of generation_config.json
    "qwen3_moe": ({}, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "qwen3_moe_tied": (TIED, {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}),
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the published layout: one per expert and projection."""
    hidden, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)

    def add_mlp(prefix: str, inner: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = shapes[f"{prefix}.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, inner)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
        for name, shape in {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "q_norm": (head,),
            "k_norm": (head,),
        }.items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = shape
        if layer in config["mlp_only_layers"]:
            add_mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            add_mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], seed: int, tokenizer_size: int, tied: bool) -> torch.Tensor:
    """Values of a tensor, from its name and the seed alone."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        values = 1.4 + 0.4 * normal  # attention that is neither flat nor stuck on one key
    elif len(shape) == 1:
        values = 1.0 + 0.3 * normal
    elif name == "model.embed_tokens.weight" and not tied:
        values = normal
    elif name in ("model.embed_tokens.weight", "lm_head.weight"):
        values = normal * 3 / shape[1] ** 0.5  # logits with a deviation of about 3
        values[tokenizer_size:] *= 0.1  # ids that no text has are never the best
    else:
        gain = {"gate": 2.0, "gate_proj": 1.5, "up_proj": 1.5, "down_proj": 2.0}.get(name.split(".")[-2], 1.0)
        values = normal * gain / shape[1] ** 0.5
    return torch.from_numpy(values).to(torch.bfloat16)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(folder: Path, variant: str, seed: int, tokenizer: Tokenizer) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "v5_style").mkdir(parents=True)
    changes, sampling = VARIANTS[variant]
    end, im_end = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    ids = {"bos_token_id": end, "eos_token_id": im_end, "vocab_size": (tokenizer.get_vocab_size() // 64 + 1) * 64}
    config = json.loads(BASE_CONFIG) | ids | changes
    write_json(folder / "config.json", config)
    generation = {"bos_token_id": end, "eos_token_id": [im_end, end], "pad_token_id": end}
    write_json(folder / "generation_config.json", generation | sampling)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        json.loads(TOKENIZER_CONFIG) | {"chat_template": CHAT_TEMPLATE},
    )
    size, tied = tokenizer.get_vocab_size(), config["tie_word_embeddings"]
    tensors = {name: random_tensor(name, shape, seed, size, tied) for name, shape in tensor_shapes(config).items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_model(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.eval()


class RouterTap:
    """Collects what the routers decide while it is open, in the order of the layers."""

    def __init__(self, model: torch.nn.Module):
        self.ids: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.gap = float("inf")
        """Smallest distance between the logits of the last expert taken and the first one left."""
        routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
        self.handles = [router.register_forward_hook(self.collect) for router in routers]

    def collect(self, module: Any, inputs: Any, outputs: Any) -> None:
        logits, weights, ids = outputs
        ranked = logits.sort(-1, descending=True).values
        self.gap = min(self.gap, float((ranked[:, module.top_k - 1] - ranked[:, module.top_k]).min()))
        self.ids.append(ids.numpy().astype(np.int32))
        self.weights.append(weights.numpy())

    def __enter__(self) -> RouterTap:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def forward(model: Any, ids: list[int], **options: Any) -> Any:
    return model(input_ids=torch.tensor([ids]), use_cache=False, **options)


def golden_values(model: Any, prompts: list[list[int]]) -> tuple[dict[str, np.ndarray], float]:
    """(arrays of golden.npz, smallest router gap over all prompt and greedy tokens)."""
    values: dict[str, np.ndarray] = {}
    router_gap = float("inf")
    for number, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(NUM_GREEDY):
            ids.append(int(forward(model, ids).logits[0, -1].argmax()))
        with RouterTap(model) as tap:
            result = forward(model, ids, output_hidden_states=True)
        router_gap = min(router_gap, tap.gap)
        logits, length = result.logits[0], len(prompt)
        steps = logits[length - 1 : -1]
        best = steps.topk(2).values
        top5 = steps.log_softmax(-1).topk(5)
        values |= {
            f"prompt_{number}": np.array(prompt, np.int32),
            f"logits_{number}": logits[:length].numpy(),
            f"greedy_{number}": np.array(ids[length:], np.int32),
            f"greedy_gap_{number}": (best[:, 0] - best[:, 1]).numpy(),
            f"top5_ids_{number}": top5.indices.numpy().astype(np.int32),
            f"top5_logprobs_{number}": top5.values.numpy(),
        }
        assert np.array_equal(steps.argmax(-1).numpy(), ids[length:])
        if number == 0:
            values["hidden_0"] = torch.stack(result.hidden_states)[:, 0, :length].numpy()
            values["router_ids_0"] = np.stack(tap.ids)[:, :length]
            values["router_weights_0"] = np.stack(tap.weights)[:, :length]
    return values, router_gap


@torch.no_grad()
def make(variant: str, seed: int, folder: Path) -> dict[str, Any]:
    """Writes one fixture and returns its manifest."""
    tokenizer = train_tokenizer(vocab_size=448)
    write_checkpoint(folder, variant, seed, tokenizer)
    model = load_model(folder)
    model.config.dtype = torch.bfloat16  # what the file holds, not what we compute with
    model.config.save_pretrained(folder / "v5_style")
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    values, router_gap = golden_values(model, prompts)
    np.savez_compressed(folder / "golden.npz", **values)  # type: ignore[arg-type]
    greedy = np.concatenate([values[f"greedy_{number}"] for number in range(len(prompts))])
    manifest = {
        "script": "scripts/make_goldens.py",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": np.__version__,
        },
        "seed": seed,
        "router_gap": router_gap,
        "argmax_gap": min(float(values[f"greedy_gap_{number}"].min()) for number in range(len(prompts))),
        "distinct_greedy_tokens": len(set(greedy.tolist())),
        "greedy_has_special": bool((greedy >= tokenizer.token_to_id(SPECIAL[0])).any()),
        "tokenizer_size": tokenizer.get_vocab_size(),
        "prompts": list(PROMPTS),
        "prompt_lengths": [len(prompt) for prompt in prompts],
    }
    write_json(folder / "manifest.json", manifest)
    return manifest


def is_clear(manifest: dict[str, Any]) -> bool:
    """No choice hangs on rounding, and the continuations are varied text that ends at no special token."""
    return (
        manifest["router_gap"] > MIN_ROUTER_GAP
        and manifest["argmax_gap"] > MIN_ARGMAX_GAP
        and manifest["distinct_greedy_tokens"] >= MIN_DISTINCT
        and not manifest["greedy_has_special"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIXTURES, help="folder that gets one folder per variant")
    parser.add_argument("--only", choices=sorted(VARIANTS), help="one variant instead of all")
    parser.add_argument("--seed", type=int, help="this seed instead of the first clear one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for variant in [options.only] if options.only else VARIANTS:
        for seed in [options.seed] if options.seed is not None else range(1000):
            manifest = make(variant, seed, options.out / variant)
            print(
                variant,
                {key: value for key, value in manifest.items() if not isinstance(value, dict | list)},
                flush=True,
            )
            if is_clear(manifest):
                break
        else:
            raise SystemExit(f"{variant}: none of the seeds tried is clear")


if __name__ == "__main__":
    main()
