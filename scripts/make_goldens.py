"""Writes the tiny checkpoints under tests/fixtures and the values that transformers computes from them.

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
seed is the first one where no choice (of an expert, of a greedy token) and no order of the best tokens hangs on rounding.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import tokenizers
import torch
import transformers
from golden_checkpoints import VARIANTS, write_checkpoint, write_json

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
NUM_GREEDY = 24
MIN_ROUTER_GAP, MIN_ARGMAX_GAP, MIN_TOP5_GAP = 1e-3, 5e-3, 2e-4
MIN_DISTINCT = 12
"""Fewest different tokens in all greedy continuations: one token for ever would prove little."""

PROMPTS = (
    "The router looks",
    "A train leaves at 7:45 and needs 90 minutes. When does it arrive? Answer in one line.\n",
    'Translate: "Die Katze schläft." 花が咲く 🌈. Then write a function that adds 12 and 30:\ndef add(a, b):\n    return a + b\n'
    "Finally, describe the weather in Lisbon, where the sun has been out for three days.",
)


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
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
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
def make(name: str, seed: int, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Writes one fixture and returns its manifest and golden values."""
    tokenizer = VARIANTS[name].train()
    write_checkpoint(folder, VARIANTS[name], seed, tokenizer)
    model = load_model(folder)
    model.config.dtype = torch.bfloat16  # what the file holds, not what we compute with
    model.config.save_pretrained(folder / "v5_style")
    prompts = [tokenizer.backend.encode(text).ids for text in PROMPTS]
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
        "greedy_has_special": not all(map(tokenizer.is_text, greedy.tolist())),
        "tokenizer_size": tokenizer.size,
        "prompts": list(PROMPTS),
        "prompt_lengths": [len(prompt) for prompt in prompts],
    }
    write_json(folder / "manifest.json", manifest)
    return manifest, values


def is_clear(manifest: dict[str, Any], values: dict[str, np.ndarray]) -> bool:
    """No choice or order hangs on rounding, and the continuations are varied text that ends at no special token."""
    top5 = np.concatenate([values[f"top5_logprobs_{number}"] for number in range(len(PROMPTS))])
    return (
        manifest["router_gap"] > MIN_ROUTER_GAP
        and manifest["argmax_gap"] > MIN_ARGMAX_GAP
        and float((top5[:, :-1] - top5[:, 1:]).min()) > MIN_TOP5_GAP
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
            manifest, values = make(variant, seed, options.out / variant)
            print(
                variant,
                {key: value for key, value in manifest.items() if not isinstance(value, dict | list)},
                flush=True,
            )
            if is_clear(manifest, values):
                break
        else:
            raise SystemExit(f"{variant}: none of the seeds tried is clear")


if __name__ == "__main__":
    main()
